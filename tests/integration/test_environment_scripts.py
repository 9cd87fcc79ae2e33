"""%environment scripts, here and as Apptainer has them: the same variables under exec, run and test, in Docker too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ekiben.artifacts.export import export
from ekiben.builder import environment
from ekiben.core.errors import LayerError
from ekiben.core.progress import Progress
from ekiben.inspect.image_info import image_of_sif
from ekiben.store import Image
from support.sample_recipe import RECIPE
from test_definition_corpus import HEADER, Lab, lab
from test_registry_base import REGISTRY
from workspaces import USER, Cli, as_user, give, home_of, need

__all__ = ["lab"]
pytestmark = pytest.mark.covers("ekiben/spec", "ekiben/resolve", "ekiben/builder", "ekiben/formats")

# What Ekiben's images have beside Apptainer's.
OURS = {"EKIBEN_RECIPE"}
# Of the machine, the engine and the shell.
OF_ENGINE = {"PWD", "SHLVL", "_", "OLDPWD", "HOSTNAME", "APPTAINER_NAME", "SINGULARITY_NAME"}
SCRIPTS = {
    "path after path": "    export PATH=/a:$PATH\n    export PATH=/b:$PATH\n",
    "a reference": "    export BASE=/opt/x\n    export BIN=$BASE/bin LIB=${BASE}/lib\n    export PATH=$BIN:$PATH\n",
    "a name twice": "    export LD_LIBRARY_PATH=/opt/a\n    export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/opt/b\n",
    "without export": "    A=b\n    B=$A-c\n    export B\n",
    "several in a line": "    export A=b C=d; E=f; export E\n",
    "of the caller": '    export CACHE=$HOME/.cache USER_OF="$USER" HERE=${PWD##*/}\n',
    "a default": "    export A=${A:-fallback} B=${CALLER:-none}\n",
    "not set anywhere": "    export LD_LIBRARY_PATH=/opt/lib:$LD_LIBRARY_PATH\n",
    "conditionals": """\
    if [ -d /etc ]; then
        export FOLDER=there
    else
        export FOLDER=gone
    fi
    [ -e /nothing ] && export NOTHING=1
    case $HOME in /*) export ABSOLUTE=yes ;; esac
""",
    "sources": "    . /opt/profile.sh\n    export AFTER=$SOURCED\n",
    "source of bash": "    source /opt/profile.sh\n    [[ $SOURCED == yes ]] && export DOUBLE=brackets\n",
    "unset": "    export A=b B=c\n    unset A\n",
    "commands": "    export NUMBER=$(echo 7) OTHER=`echo 8`\n    export SUM=$((NUMBER + 1))\n",
    "quotes": '    export A=\'$HOME\' B="a  b" D=\'it\'"\'"\'s\' F="x\\"y"\n    export E="$A"\n',
    "lines": '    export TEXT="first\nsecond"\n    export LONG=a\\\nb\n',
    "a loop and a function": """\
    add() { export LIST="${LIST:+$LIST:}$1"; }
    for one in a b c; do add "$one"; done
""",
    "an empty value": "    export EMPTY=\n    export NOT=$EMPTY.\n",
    "a heredoc": "    export TEXT=$(cat <<END\nof $HOME\nEND\n)\n",
    "a tilde": "    export A=~/x B='~'\n    export PATH=$PATH:$HOME/bin\n",
    "a backslash": "    export A=a\\ b\n",
    "a reference in its line": "    export A=b C=$A\n",
    "a tilde in a list": "    export A=b:~/c\n",
    "a remark": "    # export A=b\n    export B=c # d\n\n",
    "a table": "    export A=b\n    export PATH=/opt/bin:$PATH\n",
}
# Apptainer's own shell reads these as no other does: the page says so.
ODD = {"a backslash": {"A"}, "a reference in its line": {"C"}, "a tilde in a list": {"A"}}
POST = "\n%post\n    printf 'export SOURCED=yes\\n' >/opt/profile.sh\n"
CALLERS: Mapping[str, Mapping[str, str]] = {
    "nothing": {},
    "variables": {"CALLER": "set", "A": "of the caller", "LD_LIBRARY_PATH": "/host/lib", "FOLDER": "host"},
    "forwarded": {"APPTAINERENV_A": "forced", "APPTAINERENV_CALLER": "x", "APPTAINERENV_PREPEND_PATH": "/first"},
}


def text_of(script: str) -> str:
    show = "env -0\n"
    return f"{HEADER}{POST}\n%environment\n{script}\n%runscript\n    {show}\n%test\n    {show}"


def run(lab: Lab, caller: Mapping[str, str], *args: str | Path) -> dict[str, str]:
    """The variables that a command of Apptainer's prints."""
    env = {"PATH": os.environ["PATH"], "HOME": home_of(USER), "USER": USER, "LANG": "C.UTF-8", **caller}
    argv = ["apptainer", "--silent", *map(str, args)]
    done = subprocess.run(argv, cwd=lab.recipe.path, env=env, capture_output=True, check=False, **as_user(USER))
    assert done.returncode == 0, done.stderr
    return variables(done.stdout)


def variables(data: bytes) -> dict[str, str]:
    lines = [line.rpartition(b"test: 01-corpus.sh\n")[2] for line in data.split(b"\0")[:-1]]
    shown = dict(line.decode().split("=", 1) for line in lines)
    return {
        name: value
        for name, value in shown.items()
        if name not in OURS | OF_ENGINE and not name.startswith(("APPTAINER_", "SINGULARITY_"))
    }


def sif_of(lab: Lab, image: Image) -> Path:
    sif = lab.recipe.path / "ours.sif"
    export(image, lab.store, Progress(quiet=True), formats=("sif",), output=sif)
    sif.chmod(0o644)
    return sif


@pytest.mark.parametrize("name", SCRIPTS)
def test_variables_are_those_of_apptainer(name: str, lab: Lab) -> None:
    _, image = lab.build(text_of(SCRIPTS[name]))
    ours, theirs = sif_of(lab, image), lab.sandbox(text_of(SCRIPTS[name]))
    for title, caller in CALLERS.items():
        for command in (("exec", "IMAGE", "env", "-0"), ("run", "IMAGE"), ("test", "IMAGE")):
            at = command.index("IMAGE")
            shown = [run(lab, caller, *command[:at], path, *command[at + 1 :]) for path in (ours, theirs)]
            assert shown[0] == shown[1] != {}, (title, command)


POSTS = {
    "the variable": ('    echo "export A=b" >>$APPTAINER_ENVIRONMENT\n', "    export B=$A.\n"),
    "the old variable": (
        '    echo "export A=b" >>"$SINGULARITY_ENVIRONMENT"\n    echo "export B=$HOME" >>"${APPTAINER_ENVIRONMENT}"\n',
        "",
    ),
    "the file": ('    echo "export A=yes" >> /environment\n', "    export B=$A.\n"),
    "the file of %environment": ("    echo 'export A=yes PATH=/x:$PATH' >>/.singularity.d/env/90-environment.sh\n", ""),
    "a script": ('    mkdir -p /.singularity.d/env\n    echo "export A=yes" > /.singularity.d/env/91-own.sh\n', ""),
    "scripts before and after": (
        '    echo "export A=one B=two" >/.singularity.d/env/20-own.sh\n'
        '    echo "export C=$A-$B" >/.singularity.d/env/zz.sh\n',
        "    export A=$A.three\n",
    ),
    "labels": (
        '    echo "L one two" >>$APPTAINER_LABELS\n    echo "export A=b" >>/environment\n',
        "\n%labels\n    L three\n    N four\n",
    ),
}


@pytest.mark.parametrize("engine", ["docker", "buildah", "podman"])
def test_other_engines_make_the_same_layers(engine: str, lab: Lab, cli: Cli) -> None:
    """In a base that has few programs. Docker reads the changes with the image's own."""
    need(engine)
    post, section = POSTS["the variable"]
    text = f"{HEADER}\n%post -c /bin/bash\n    true {engine}\n{post}\n%environment\n{section}"
    _, image = lab.build(text)
    for layer in image.layers[1:]:
        (lab.store.root / "keys" / f"{layer.cache_key}.json").unlink()
    argv = ("--engine", engine, "--format", "oci", "-o", lab.out / f"{engine}.tar", "--no-verify")
    made = cli.image(lab.store.root, lab.recipe.path, *argv, cwd=lab.recipe.path)
    assert len(made["built"]) == len(image.layers) - 1
    assert made["image"] == image.image_id


@pytest.mark.parametrize("name", POSTS)
def test_what_a_script_adds_is_as_with_apptainer(name: str, lab: Lab) -> None:
    post, section = POSTS[name]
    environment = "" if section.startswith("\n%") else "\n%environment\n"
    text = f"{HEADER}\n%post\n{post}{environment}{section}"
    _, image = lab.build(text)
    ours, theirs = sif_of(lab, image), lab.sandbox(text)
    for title, caller in CALLERS.items():
        shown = [run(lab, caller, "exec", path, "env", "-0") for path in (ours, theirs)]
        assert shown[0] == shown[1] != {}, title
    assert "A" in run(lab, {}, "exec", ours, "env", "-0")
    labels = [lab.apptainer("inspect", "--labels", path).splitlines() for path in (ours, theirs)]
    lines = [[line for line in one if line.startswith(("L:", "N:"))] for one in labels]
    assert lines[0] == lines[1]
    assert image_of_sif(ours, lab.store, Progress(quiet=True)).image.config == image.config
    lab.recipe.write("images/below.def", text)
    _, image = lab.build("Bootstrap: localimage\nFrom: below.sif\n\n%post\n    echo above $A >/opt/above\n")
    assert lab.apptainer("exec", sif_of(lab, image), "cat", "/opt/above") == f"above {image.environment['A']}\n"


@pytest.fixture
def docker(lab: Lab) -> Iterator[str]:
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker daemon answers")
    tag = f"ekiben/{RECIPE['name']}:latest"
    yield tag
    subprocess.run(["docker", "rmi", "--force", tag], capture_output=True, check=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_docker_has_the_same_values(name: str, lab: Lab, docker: str) -> None:
    _, image = lab.build(text_of(SCRIPTS[name]))
    export(image, lab.store, Progress(quiet=True), formats=("docker",))
    expected = run(
        lab, {}, "exec", "--cleanenv", "--contain", "--no-home", "--pwd", "/srv", sif_of(lab, image), "env", "-0"
    )
    argv = [
        "docker",
        "run",
        "--rm",
        "--network",
        "none",
        "-e",
        f"HOME={home_of(USER)}",
        "-w",
        "/srv",
        docker,
        "env",
        "-0",
    ]
    shown = variables(subprocess.run(argv, capture_output=True, check=True).stdout)
    of_apptainer = {"LANG", "PS1", "PROMPT_COMMAND", "LD_LIBRARY_PATH", "TERM", "USER_PATH", "LD_PRELOAD"}
    names = (shown.keys() | expected.keys()) - of_apptainer - ODD.get(name, set())
    assert all(shown[one] != expected[one] for one in ODD.get(name, ())), "the page says that they differ"
    assert {one: shown.get(one) for one in names} == {one: expected.get(one) for one in names}
    caller = variables(
        subprocess.run(
            [*argv[:3], "-e", "A=mine", "-e", "PATH=/bin:/usr/bin", *argv[3:]], capture_output=True, check=True
        ).stdout
    )
    assert (caller["A"], caller["PATH"]) == ("mine", "/bin:/usr/bin"), "what the caller sets stays"


def test_layers_above_see_what_a_script_sets(lab: Lab) -> None:
    lab.recipe.write(
        "images/below.def",
        text_of(SCRIPTS["sources"] + "    export PATH=/b:$PATH\n    export PATH=/a:$PATH CACHE=$HOME/x\n").replace(
            POST,
            f"{POST}    printf x >/opt/below\n",  # a record keeps the name of the layer that had its key first
        ),
    )
    text = (
        "Bootstrap: localimage\nFrom: below.sif\n\n%post\n    printf '%s %s %s' $SOURCED $PATH $CACHE >/opt/seen\n"
        "\n%environment\n    export ABOVE=$AFTER\n"
    )
    resolved, image = lab.build(text)
    assert [layer.name for layer in resolved.layers] == [
        "base",
        "below",
        "below-environment",
        "corpus",
        "corpus-environment",
        RECIPE["name"],
    ]
    sif = sif_of(lab, image)
    seen = subprocess.run(
        ["apptainer", "exec", sif, "cat", "/opt/seen"], capture_output=True, text=True, check=True
    ).stdout
    path = "/a:/b:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert seen == f"yes {path} /root/x"
    assert image.environment["ABOVE"] == "yes"
    config = json.loads(image.config)["config"]
    assert f"PATH={path}" in config["Env"]
    assert image_of_sif(sif, lab.store, Progress(quiet=True)).image.config == image.config
    assert not any(line.startswith("CACHE=") for line in config["Env"]), "it depends on the start"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("    export A=b\n    if true; then\n", "the shell cannot read it"),
        ("    exit 3\n", "the shell ends before its last line"),
        ("    while :; do :; done\n", "it does not end within"),
        ("    export A=$(printf '\\377')\n", "it sets A to bytes that are no UTF-8"),
    ],
)
def test_script_that_cannot_be_evaluated(script: str, reason: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SECONDS", 2)
    with pytest.raises(LayerError) as caught:
        lab.build(f"{HEADER}\n%environment\n{script}")
    assert f"corpus.def:5: %environment cannot be evaluated in the image: {reason}" in str(caught.value)


CONFIG = (
    'ENV FROM_BASE=yes QUOTED="it\'s 5 words" PATH=/opt/base:/usr/local/bin:/usr/bin:/bin',
    "USER 1234",
    "WORKDIR /srv",
    'ENTRYPOINT ["/usr/bin/env", "STARTED=yes"]',
    'CMD ["env", "-0"]',
    "LABEL org.example.base=one",
)


@pytest.fixture
def hub(lab: Lab) -> Iterator[str]:
    """A reference of an image with a configuration of its own in the local registry."""
    need("docker", "curl")
    tag = f"{REGISTRY}/ekiben-test/config:1"
    with subprocess.Popen(
        ["tar", "-C", lab.recipe.path.parent / "root", "-cf", "-", "."], stdout=subprocess.PIPE
    ) as tar:
        changes = [word for line in CONFIG for word in ("--change", line)]
        subprocess.run(["docker", "import", *changes, "-", tag], stdin=tar.stdout, check=True, capture_output=True)
    pushed = subprocess.run(["docker", "push", tag], check=True, capture_output=True, text=True).stdout
    digest = re.search(r"digest: (sha256:\w+)", pushed)
    assert digest
    yield f"{tag.removesuffix(':1')}@{digest[1]}"
    subprocess.run(["docker", "rmi", "--force", tag], capture_output=True, check=False)


def test_base_out_of_a_registry_keeps_its_configuration(lab: Lab, hub: str, docker: str) -> None:
    post = "\n%post\n    printf '%s %s %s' $FROM_BASE $ABOVE $PATH >/opt/seen\n"
    lab.recipe.write("images/hub.def", f"Bootstrap: docker\nFrom: {hub}\n\n%environment\n    export ABOVE=$FROM_BASE\n")
    _, image = lab.build(f"Bootstrap: localimage\nFrom: hub.sif\n{post}")
    text = f"Bootstrap: docker\nFrom: {hub}\n\n%environment\n    export ABOVE=$FROM_BASE\n"
    lab.recipe.write("corpus.def", text)
    sandbox = Path(tempfile.mkdtemp(dir=lab.out)) / "tree"
    give(sandbox.parent, USER)
    lab.apptainer("build", "--fakeroot", "--no-https", "--sandbox", sandbox, "corpus.def")
    sif = sif_of(lab, image)
    for title, caller in CALLERS.items():
        for command in (("exec", "IMAGE", "env", "-0"), ("run", "IMAGE"), ("run", "IMAGE", "env", "-0")):
            at = command.index("IMAGE")
            shown = [run(lab, caller, *command[:at], path, *command[at + 1 :]) for path in (sif, sandbox)]
            assert shown[0] == shown[1] != {}, (title, command)
            assert ("STARTED" in shown[0]) == (command[0] == "run")
    path = "/opt/base:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
    assert lab.apptainer("exec", sif, "cat", "/opt/seen") == f"yes yes {path}"
    assert "org.example.base: one" in lab.apptainer("inspect", "--labels", sif)
    assert image_of_sif(sif, lab.store, Progress(quiet=True)).image.config == image.config
    export(image, lab.store, Progress(quiet=True), formats=("docker",))
    inside = variables(subprocess.run(["docker", "run", "--rm", docker], capture_output=True, check=True).stdout)
    expected = {"FROM_BASE": "yes", "ABOVE": "yes", "STARTED": "yes", "PATH": path, "QUOTED": "it's 5 words"}
    assert expected.items() <= inside.items()
    config = json.loads(image.config)["config"]
    assert (config["User"], config["Labels"]["org.example.base"]) == ("1234", "one")
