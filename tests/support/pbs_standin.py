"""A stand-in for PBS Professional, which no package archive has: only for tests, and strict.

`pbs_standin.py qsub …`, and so qstat, qdel and pbs_tmrsh. It knows the options that the PBS Professional user's guide
documents and that we use, refuses all others as PBS does, and runs jobs on this machine: as on a real one, with a small
environment, in the home directory, output delivered at the end, SIGTERM at the end of the walltime. State is in
$PBS_STANDIN.
"""

from __future__ import annotations

import contextlib
import getopt
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

ROOM = Path(os.environ.get("PBS_STANDIN") or Path(__file__).resolve().parent.parent / "state")
NODES, GPUS, LONGEST, SERVER = ("localhost", "127.0.0.1"), 4, 24 * 3600, "standin"
TOGETHER = r"ncpus=\d+|ngpus=\d+|mpiprocs=\d+|ompthreads=\d+|mem=\d+[kmg]?b"


def refuse(message: str, code: int = 1) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


# ----------------------------------------------------------------------------------------------------------------- qsub


def qsub(argv: list[str]) -> None:
    options, rest = parse(argv)
    if len(rest) > 1:
        refuse("usage: qsub [options] [script]", 2)
    text = Path(rest[0]).read_text() if rest else sys.stdin.read()
    asked: dict[str, list[str]] = {}
    for name, value in [*directives(text), *options]:  # what the command line says beats the script
        if name == "-l":
            asked.setdefault("-l", []).append(value)
        else:
            asked[name] = [value]
    job = check(asked)
    number = new_number()
    id = f"{number}[].{SERVER}" if job["indices"] else f"{number}.{SERVER}"
    for index in job["indices"] or [0]:
        about = {**job, "id": id, "index": index, "state": "H" if job["after"] else "Q", "work": str(Path.cwd())}
        folder = ROOM / f"{number}.{index}"
        folder.mkdir()
        (folder / "script").write_text(text)
        write(folder, about)
        subprocess.Popen(
            [sys.executable, __file__, "run", str(folder)],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(folder / "errors").open("w"),
            env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PBS_STANDIN": str(ROOM)},
        )
    print(id)


def parse(argv: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    try:
        return getopt.getopt(argv, "N:q:P:A:l:S:j:o:J:r:W:v:")
    except getopt.GetoptError as error:
        refuse(f"qsub: invalid option -- '{error.opt}'", 2)


def directives(text: str) -> list[tuple[str, str]]:
    """As PBS reads them: up to the first line that is a command."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("#PBS "):
            options, rest = parse(shlex.split(line[5:]))
            if rest:
                refuse(f"qsub: directive error: {line}", 2)
            found += options
        elif line.strip() and not line.startswith("#"):
            break
    return found


def check(asked: dict[str, list[str]]) -> dict[str, Any]:
    def one(name: str, pattern: str, default: str = "") -> str:
        value = asked.get(name, [default])[0]
        if name in asked and not re.fullmatch(pattern, value):
            refuse(f"qsub: illegal {name} value '{value}'", 2)
        return value

    one("-N", r"[A-Za-z0-9+._-]{1,15}")
    one("-S", r"/\S+")
    one("-j", r"oe|eo|n")
    one("-r", r"[yn]")
    one("-P", r"\S+")
    if one("-q", r"\S+", "rt_HF") not in ("rt_HF", "rt_HG"):
        refuse("qsub: Unknown queue", 170)
    seconds, nodes = 3600, 1
    for value in asked.get("-l", []):
        if found := re.fullmatch(r"walltime=(\d+):(\d\d):(\d\d)", value):
            seconds = int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3])
        elif found := re.fullmatch(rf"select=(\d+)((?::(?:{TOGETHER}))*)", value):
            nodes = int(found[1])
            if any(int(count) > GPUS for count in re.findall(r"ngpus=(\d+)", found[2])) or nodes > len(NODES):
                refuse("qsub: Job violates queue and/or server resource limits", 188)
        elif not re.fullmatch(r"place=(free|pack|scatter|vscatter)(:(excl|exclhost|shared))?", value):
            refuse(f"qsub: illegal -l value '{value}'", 2)
    if seconds > LONGEST:
        refuse("qsub: Job violates queue and/or server resource limits", 188)
    first, last = (int(part) for part in one("-J", r"\d+-\d+", "0-0").split("-"))
    if "-J" in asked and first >= last:
        refuse("qsub: illegal -J value", 2)
    depend = re.fullmatch(r"depend=(afterany|afterok):(\S+)", one("-W", r"depend=(afterany|afterok):\S+", ""))
    variables = dict(pair.split("=", 1) for pair in one("-v", r"[A-Z_]+=[^,]*(,[A-Z_]+=[^,]*)*").split(",") if pair)
    return {
        "name": asked.get("-N", ["STDIN"])[0],
        "output": asked.get("-o", [""])[0],
        "seconds": seconds,
        "nodes": nodes,
        "indices": list(range(first, last + 1)) if "-J" in asked else [],
        "after": [depend[1], depend[2]] if depend else None,
        "variables": variables,
        "code": None,
        "pid": None,
    }


def new_number() -> int:
    ROOM.mkdir(exist_ok=True)
    for number in range(100, 10_000):
        with contextlib.suppress(FileExistsError):
            (ROOM / f"number-{number}").mkdir()
            return number
    raise AssertionError("too many jobs")


# -------------------------------------------------------------------------------------------------------------- running


def run(folder: Path) -> None:
    job = read(folder)
    while job["after"]:
        others = [other for other in everything() if other["id"] == job["after"][1]]
        if all(other["state"] == "F" for other in others):
            if job["after"][0] == "afterok" and any(other["code"] for other in others):
                return write(folder, {**job, "state": "F", "code": -1})
            break
        time.sleep(0.1)
        if read(folder)["state"] == "F":  # deleted
            return None
    (folder / "nodes").write_text("".join(f"{node}\n" for node in NODES[: job["nodes"]]))
    number = job["id"].partition(".")[0].removesuffix("[]")
    id = f"{number}[{job['index']}].{SERVER}" if job["index"] else job["id"]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "PBS_STANDIN": str(ROOM),
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_JOBID": id,
        "PBS_JOBNAME": job["name"],
        "PBS_O_WORKDIR": job["work"],
        "PBS_NODEFILE": str(folder / "nodes"),
        **({"PBS_ARRAY_INDEX": str(job["index"])} if job["index"] else {}),
        **job["variables"],
    }
    with (folder / "output").open("w") as output:
        child = subprocess.Popen(
            ["/bin/bash", folder / "script"],
            env=environment,
            cwd=os.environ["HOME"],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        write(folder, {**job, "state": "R", "pid": child.pid})
        try:
            code = child.wait(job["seconds"])
        except subprocess.TimeoutExpired:
            end(child.pid)
            code = child.wait()
    if job["output"]:
        Path(job["output"]).write_text((folder / "output").read_text())
    return write(folder, {**job, "state": "F", "pid": None, "code": code})


def end(pid: int) -> None:
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 0.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
        time.sleep(seconds)


def pbs_tmrsh(argv: list[str]) -> None:
    host, *command = argv
    if host not in Path(os.environ["PBS_NODEFILE"]).read_text().split():
        refuse(f"pbs_tmrsh: {host} is not a host of job {os.environ['PBS_JOBID']}", 2)
    if not command[0].startswith("/"):
        refuse(f"pbs_tmrsh: {command[0]}: the path has to be a full one", 2)
    os.execv(command[0], command)


# ------------------------------------------------------------------------------------------------------ looking, ending


def qstat(argv: list[str]) -> None:
    if argv == ["-B"]:
        print(SERVER)
    elif argv[:2] == ["-Q", "-f"] and len(argv) == 3:
        print(f"Queue: {argv[2]}\n    resources_max.walltime = 24:00:00")
    elif argv[:1] == ["-f"] and len(argv) == 2:
        states = {job["id"].replace("[]", f"[{job['index']}]"): job["state"] for job in everything()}
        if argv[1] not in states:
            refuse(f"qstat: Unknown Job Id {argv[1]}", 153)
        if states[argv[1]] == "F":
            refuse(f"qstat: {argv[1]} Job has finished, use -x or -H to obtain historical job information", 35)
        print(f"Job Id: {argv[1]}\n    job_state = {states[argv[1]]}\n")
    elif argv[:5] == ["-x", "-t", "-f", "-F", "json"]:
        known = everything()
        if missing := [id for id in argv[5:] if id not in {job["id"] for job in known}]:
            refuse(f"qstat: Unknown Job Id {missing[0]}", 153)
        rows = {}
        for job in known:
            if job["id"] in argv[5:]:
                location = (
                    {"exec_host": "+".join(f"{node}/0" for node in NODES[: job["nodes"]])}
                    if job["state"] == "R"
                    else {}
                )
                rows[job["id"].replace("[]", f"[{job['index']}]")] = {"job_state": job["state"], **location}
        print(json.dumps({"pbs_version": "stand-in", "Jobs": rows}))
    else:
        refuse(f"qstat: illegal option in {argv}", 2)


def qdel(ids: list[str]) -> None:
    for job in everything():
        if job["id"] in ids and job["state"] != "F":
            number = job["id"].partition(".")[0].removesuffix("[]")
            if job["pid"]:
                end(job["pid"])
            else:
                write(ROOM / f"{number}.{job['index']}", {**job, "state": "F", "code": -1})


def everything() -> list[dict[str, Any]]:
    return [read(path.parent) for path in sorted(ROOM.glob("*/job.json"))]


def read(folder: Path) -> dict[str, Any]:
    about = json.loads((folder / "job.json").read_text())
    assert isinstance(about, dict)
    return about


def write(folder: Path, about: dict[str, Any]) -> None:
    (folder / "new").write_text(json.dumps(about))
    (folder / "new").rename(folder / "job.json")


if __name__ == "__main__":
    called, *given = sys.argv[1:]
    if called == "run":
        run(Path(given[0]))
    else:
        {"qsub": qsub, "qstat": qstat, "qdel": qdel, "pbs_tmrsh": pbs_tmrsh}[called](given)
