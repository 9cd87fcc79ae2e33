"""The structure of the code, read from its imports: floors, circles, faces, sizes. ``make architecture`` prints it.

A package is what lies directly below ``ekiben``, or below ``ekiben_tasks``. Its floor is one more than the highest
floor it imports from. Imports inside functions count; those under TYPE_CHECKING do not.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Import:
    """``source`` imports ``name`` (None: the module itself) from the module ``target``, at ``line``."""

    source: str
    target: str
    name: str | None
    line: int


def modules_below(folder: Path, prefix: str) -> dict[str, Path]:
    """Return every module of the package in ``folder``, by its dotted name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [prefix, *path.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, path: Path) -> Sequence[Import]:
    """Return every import of one module, those inside functions too."""
    return _imports_of(name, path, path.stat().st_mtime_ns)


@functools.cache
def _imports_of(name: str, path: Path, modified: int) -> Sequence[Import]:
    return [*_read_imports(name, path)]


def _read_imports(name: str, path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for part in node.body
        for inner in ast.walk(part)
    }
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (Import(name, base, alias.name, node.lineno) for alias in node.names)


def edges(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return which module imports which, both of ``modules``."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for item in imports_of(name, path):
            target = f"{item.target}.{item.name}" if f"{item.target}.{item.name}" in modules else item.target
            if target in modules and target != name:
                graph[name].add(target)
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other."""
    reach = {node: _reachable(graph, node) for node in graph}
    groups = {
        frozenset({node, *(other for other in reach[node] if node in reach[other])})
        for node in graph
        if node in reach[node]
    }
    return sorted(sorted(group) for group in groups)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            waiting += graph[node]
    return seen


def package_of(module: str) -> str:
    """Return the package a module belongs to: the first name below the top one, whose own files count as packages,
    too.
    """
    return ".".join(module.split(".")[:2])


def package_graph(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the same graph between packages."""
    found: dict[str, set[str]] = {}
    for name, targets in graph.items():
        found.setdefault(package_of(name), set()).update(package_of(target) for target in targets)
    return {package: targets - {package} for package, targets in found.items()}


def floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the floor of each node of a graph without circles; 1 is the ground."""
    found: dict[str, int] = {}

    def floor(node: str) -> int:
        if node not in found:
            found[node] = 1 + max((floor(other) for other in graph[node]), default=0)
        return found[node]

    for node in graph:
        floor(node)
    return found


def exported(face: Path) -> set[str]:
    """Return the names in a package's ``__all__``."""
    for node in ast.parse(face.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(item, ast.Name) and item.id == "__all__" for item in node.targets
        ):
            return set(ast.literal_eval(node.value))
    return set()


def passed_faces(modules: Mapping[str, Path]) -> list[str]:
    """Return imports of what another package does not name in its face, a line each."""
    problems = []
    for name, path in modules.items():
        for item in imports_of(name, path):
            package = package_of(item.target)
            if (
                package not in modules
                or package.count(".") == 0
                or package == package_of(name)
                or modules[package].name != "__init__.py"
            ):
                continue
            public = exported(modules[package])
            taken = item.target.split(".")[2] if item.target.count(".") > 1 else item.name
            if taken not in public:
                problems.append(f"{path.relative_to(ROOT)}:{item.line}: {taken} is not in {package}'s __all__")
            elif item.name and item.name.startswith("_"):
                problems.append(f"{path.relative_to(ROOT)}:{item.line}: {item.name} is private")
    return problems


def long_functions(paths: Iterable[Path], limit: int) -> list[str]:
    """Return functions of more than ``limit`` lines."""
    found = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > limit:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    return found


def wide_functions(paths: Iterable[Path], limit: int) -> set[str]:
    """Return functions of more than ``limit`` parameters, without click's callbacks: one for each option."""
    wide = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len(names) - (names[:1] in (["self"], ["cls"])) > limit and not _is_callback(node):
                    wide.add(f"{path.relative_to(ROOT)} {node.name}")
    return wide


def _is_callback(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(item).startswith(("click.command", "command.command")) for item in function.decorator_list)


def long_files(paths: Iterable[Path], limit: int) -> list[str]:
    """Return files of more than ``limit`` lines."""
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    return [f"{path.relative_to(ROOT)}: {size} lines" for path, size in sizes.items() if size > limit]


def builder_modules() -> dict[str, Path]:
    """Return the modules of the builder, with build.py on top."""
    return {**modules_below(ROOT / "ekiben", "ekiben"), "build": ROOT / "build.py"}


def task_modules() -> dict[str, Path]:
    """Return the modules of the tasks' library, and the commands that stand on it."""
    folder = ROOT / "entrypoints"
    commands = {path.stem: path for path in sorted(folder.glob("*.py"))}
    return {**modules_below(folder / "ekiben_tasks", "ekiben_tasks"), **commands}


def main() -> None:
    """Print floors, circles and sizes."""
    for title, modules in (("builder", builder_modules()), ("tasks", task_modules())):
        graph = edges(modules)
        between = package_graph(graph)
        found = circles(between)
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules.values())
        print(f"{title}: {len(modules)} modules, {lines} lines, {len(between)} packages")
        print("  circles between modules: ", circles(graph) or "none")
        print("  circles between packages:", found or "none")
        if not found:
            levels = floors(between)
            for level in range(max(levels.values()), 0, -1):
                print(
                    f"  floor {level}:"
                    f" {' '.join(sorted(package.rpartition('.')[2] for package in levels if levels[package] == level))}"
                )
    for line in passed_faces(builder_modules()) + passed_faces(task_modules()):
        print("past a face:", line)


if __name__ == "__main__":
    main()


# -------------------------------------------------------------------------------------------------- files by their path

_OF_PATHS = re.compile(
    "chmod|exists|glob|group|hardlink_to|is_dir|is_file|is_mount|is_symlink|iterdir|lchmod|lstat|mkdir|open|owner|read_bytes|read_text|"
    "readlink|rglob|rmdir|samefile|stat|symlink_to|touch|unlink|write_bytes|write_text"
)  # methods of pathlib; an InnerPath has none of these names
_MODULES = {"os", "os.path", "shutil", "tempfile", "glob", "io"}
_WITHOUT_PATHS = re.compile(
    "abspath|close|dup|fchmod|fchown|fsencode|fspath|fstat|fstatvfs|fsync|get(eg|eu|p|u)id|getgroups|kill|normpath|relpath|samestat|"
    "strerror|uname"
)  # of these modules
_HELPERS = {
    "atomic_write",
    "make_folders",
    "new_file",
    "read_regular",
    "read_source",
    "read_yaml",
    "remove_tree",
}  # of ekiben.core


def calls_by_path(path: Path) -> set[str]:
    """Return ``FUNCTION CALL`` of each call in a module that names a file to the kernel by its path, relative to no
    descriptor.
    """
    calls = set()
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            keywords = {keyword.arg for keyword in call.keywords}
            if _names_path(call) and not keywords & {"dir_fd", "src_dir_fd", "dst_dir_fd"}:
                calls.add(f"{function.name} {ast.unparse(call.func)}")
    return calls


def _names_path(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in _HELPERS | {"open"}
    if not isinstance(call.func, ast.Attribute):
        return False
    module = ast.unparse(call.func.value)
    if module in _MODULES:
        return not _WITHOUT_PATHS.fullmatch(call.func.attr)
    return bool(_OF_PATHS.fullmatch(call.func.attr))


_COPIERS = {"copy", "copy2", "copyfile", "copytree", "move"}  # of shutil


def reading_calls(path: Path) -> set[str]:
    """Return ``FUNCTION CALL`` of each call in a module that reads a file, or opens one to read, but by the one reader
    or a Folder.
    """
    calls = set()
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef):
            calls |= {
                f"{function.name} {ast.unparse(call.func)}"
                for call in ast.walk(function)
                if isinstance(call, ast.Call) and _reads(call)
            }
    return calls


def _reads(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    attribute = name.rpartition(".")[2]
    if attribute in ("read_text", "read_bytes") or (name.startswith("shutil.") and attribute in _COPIERS):
        return True
    if name == "os.open":
        return "O_CREAT" not in ast.unparse(call)
    if attribute != "open" or name in ("Folder.open", "tarfile.open", "cls"):
        return False
    words = [
        *call.args[name in ("open", "os.fdopen") :],
        *(keyword.value for keyword in call.keywords if keyword.arg == "mode"),
    ]
    modes = [word.value for word in words[:1] if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return not modes or not set(modes[0]) & set("wxa")
