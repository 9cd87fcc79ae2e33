"""Site profiles: what ships reads, what a user writes is checked with the file, the key and the nearest known one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, UsageError
from ekiben.core.paths import PROJECT_ROOT
from ekiben.run.site import Site, find_site, site_paths, user_folder, version_of
from support.sample_recipe import RunCli

SHIPPED = sorted(path.stem for path in (PROJECT_ROOT / "sites").glob("*.yaml"))
SMALLEST = "name: mine\ndescription: ours\nnode:\n  gpus: [{model: T4, capability: '7.5', memory_gib: 15}]\n"


@pytest.fixture(autouse=True)
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config/ekiben/sites"


def written(folder: Path, text: str = SMALLEST, name: str = "mine") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_are_consistent(name: str) -> None:
    """Its name is its file's, and each resource asks for no more than a node of it has."""
    site = find_site(name)
    assert site.name == name
    assert site.path.read_text().startswith("# ")  # where the data are from
    assert site.file.node.gpus
    for resource in site.file.scheduler.resources.values() if site.file.scheduler else ():
        assert resource.gpus <= sum(gpu.count for gpu in site.file.node.gpus)
        assert (resource.cores or 0) <= (site.file.node.cores or 10**6)
        assert resource.exclusive or not resource.max_nodes or resource.max_nodes == 1


def test_abci_profiles_match_the_users_guide() -> None:
    old, new = find_site("abci-2.0").file.scheduler, find_site("abci-3.0").file.scheduler
    assert old and new
    assert (old.kind, old.group_option, old.group_in_script) == ("sge", "-g", False)
    assert [word.format(nodes=4) for word in old.resources["rt_F"].request] == ["-l rt_F=4"]
    assert (new.kind, new.group_option, new.group_in_script) == ("pbs", "-P", True)
    assert [word.format(nodes=2) for word in new.resources["rt_HF"].request] == ["-q rt_HF", "-l select=2"]
    assert new.resources["rt_HG"].gpus == 1


def test_profile_of_the_user_wins(own_config: Path, tmp_path: Path) -> None:
    assert user_folder() == own_config
    written(own_config)
    assert find_site("mine").path == own_config / "mine.yaml"
    assert set(site_paths()) == {*SHIPPED, "mine"}
    written(own_config, SMALLEST.replace("mine", "abci-3.0"), "abci-3.0")
    assert find_site("abci-3.0").path == own_config / "abci-3.0.yaml"
    assert find_site(str(written(tmp_path))).name == "mine"


LAB = """\
name: lab
description: our cluster
node:
  gpus: [{model: NVIDIA L40S, capability: '8.9', memory_gib: 45, count: 4}]
  driver: "570.26"
modules: [cuda]
scheduler:
  kind: slurm
  group_option: --account=
  resources:
    gpu: {request: ["--partition=gpu", "--nodes={nodes}", "--gpus-per-node={gpus}"], gpus: 4}
"""


def test_a_site_is_added_by_one_file(run_cli: RunCli, own_config: Path) -> None:
    """Doctor and submit know it by its name; no code names it."""
    missing = run_cli("submit", "--site", "lab", "--dry-run", "hello", "hello", code=2).stderr
    assert "no site 'lab'" in missing
    written(own_config, LAB, "lab")
    done = run_cli("submit", "--site", "lab", "--account", "me", "--dry-run", "hello", "hello")
    assert "#SBATCH --partition=gpu\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=4\n#SBATCH --account=me\n" in re.sub(
        r"#SBATCH --ntasks-per-node=1\n", "", done.stdout
    )
    assert "module load cuda\n" in done.stdout
    assert "4 × NVIDIA L40S 45 GiB (8.9), driver 570.26" in run_cli("doctor", "--site", "lab").stdout


def test_missing_facts_are_none(tmp_path: Path) -> None:
    node = find_site(str(written(tmp_path))).file.node
    assert (node.driver, node.glibc, node.user_namespaces, node.internet) == (None, None, None, None)
    assert [gpu.count for gpu in node.gpus] == [1]


def test_unknown_site_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^no site 'abci3'\. Did you mean 'abci-3\.0'\?"):
        find_site("abci3")
    with pytest.raises(UsageError, match=r"no such site profile$"):
        find_site(str(tmp_path / "none.yaml"))


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(DefinitionError) as caught:
        _: Site = find_site(str(written(tmp_path, text)))
    return str(caught.value).removeprefix(f"{tmp_path}/mine.yaml: ")


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("nodes: {}", "unknown key 'nodes'. Did you mean 'node'?"),
        ("runtimes: [{kind: apptaner}]", "runtimes.0: kind: 'apptaner' is not known. Did you mean 'apptainer'?"),
        (
            "runtimes: [{kind: apptainer, version: new}]",
            "runtimes.0: version: should be a version, as \"580.65.06\" (found: 'new')",
        ),
        ("storage: {hom: {path: /home}}", "storage: 'hom' is not known. Did you mean 'home'?"),
        ("storage: {home: {path: /home, quota_gib: 0}}", "storage.home: quota_gib: should be at least 1 (found: 0)"),
        ("network: {kind: infinband}", "network: kind: 'infinband' is not known. Did you mean 'infiniband'?"),
        (
            "environment: {'A;touch x': '1'}",
            "environment: 'A;touch x' is not the name of a variable: letters, digits and '_'",
        ),
        ("scheduler: {kind: slrum}", "scheduler: kind: 'slrum' is not known. Did you mean 'slurm'?"),
        (
            "scheduler: {kind: pbs, group_required: true}",
            "scheduler: group_required: needs group_option, the scheduler's option for it",
        ),
        (
            "scheduler: {kind: pbs, resources: {a: {request: ['-l x={node}']}}}",
            (
                "scheduler.resources.a: request: '-l x={node}': only {nodes}, {gpus}, {cores} and {memory_gib} are"
                " filled in (no 'node')"
            ),
        ),
        *(
            (
                f"scheduler: {{kind: pbs, resources: {{a: {{request: ['{word}']}}}}}}",
                (
                    f"scheduler.resources.a: request: '{word}': only {{nodes}}, {{gpus}}, {{cores}} and {{memory_gib}}"
                    f" are filled in ({reason})"
                ),
            )
            for word, reason in {
                "{nodes:>999999999}": "no format of 'nodes'",
                "{nodes!r}": "no format of 'nodes'",
                "{gpus:{nodes}}": "no format of 'gpus'",
                "{nodes.real}": "no 'nodes.real'",
                "{}": "no ''",
                "x={nodes": "expected '}' before end of string",
            }.items()
        ),
    ],
)
def test_invalid_profiles_are_refused(tmp_path: Path, added: str, message: str) -> None:
    assert refused(tmp_path, f"{SMALLEST}{added}\n") == message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("'7.5'", "'7'", "node.gpus.0: capability: should be a compute capability, as \"9.0\" (found: '7')"),
        ("'7.5'", "7.5", "node.gpus.0.capability: should be a string (found: 7.5)"),
        ("memory_gib: 15", "memory_gib: 0", "node.gpus.0: memory_gib: should be at least 1 (found: 0)"),
    ],
)
def test_invalid_gpus_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert refused(tmp_path, SMALLEST.replace(old, new)) == message


@pytest.mark.parametrize(
    ("text", "version"),
    [("580.65.06", (580, 65, 6)), ("1.4.5-1", (1, 4, 5)), ("2.36", (2, 36)), ("v4", (4,)), ("3.11-5.el8", (3, 11))],
)
def test_version_is_parsed(text: str, version: tuple[int, ...]) -> None:
    assert version_of(text) == version


def test_invalid_version_is_refused() -> None:
    with pytest.raises(ValueError, match="'none' is not a version"):
        version_of("none")
