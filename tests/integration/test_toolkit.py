"""The toolkit's nvcc, in a build stage on the real layers: what it compiles, what of it ships, and twice the same
bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ekiben.builder.build import BuildContext, build
from ekiben.builder.plan import Options
from ekiben.builder.wheels import read_wheel, wheels_of
from ekiben.core.progress import Progress
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Image, Store, StoredResult
from workspaces import ME, ROOT, RecipeFolder, Workspace

pytestmark = pytest.mark.covers("ekiben/builder", "images/toolkit.def")

LAYER = """\
Bootstrap: localimage
From: toolkit.sif
Stage: build

%arguments
    capabilities=8.0 9.0

%files
    files/kernel.cu /opt/kernel/kernel.cu
    files/setup.py /opt/kernel/setup.py

%post
    export CAPABILITIES="{{ capabilities }}"
    python /opt/ekiben/compile.py /opt/kernel /opt/wheels/kernel

%labels
    org.ekiben.wheel kernel

Bootstrap: localimage
From: pytorch.sif
Stage: runtime

%files
    files/install_wheel.py /opt/ekiben/install_wheel.py

%files from build
    /opt/wheels/kernel /opt/wheels/kernel

%post
    /opt/venv/bin/python /opt/ekiben/install_wheel.py /opt/wheels/kernel

%test
    set -e
    python -c 'import torch, kernel; assert kernel.answer() == 42'
    test ! -e /opt/cuda
    test ! -e /opt/wheels
"""
KERNEL = """\
#include <Python.h>
__global__ void scale(float *x, float by) { x[threadIdx.x] *= by; }
static PyObject *launch(PyObject *, PyObject *) { scale<<<1, 32>>>(nullptr, 2.0f); Py_RETURN_NONE; }
static PyObject *answer(PyObject *, PyObject *) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {"launch", launch, METH_NOARGS, ""},
                                {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernel", "", -1, methods};
PyMODINIT_FUNC PyInit_kernel() { return PyModule_Create(&module); }
"""
# Not torch's own CUDAExtension: its headers take a minute to read.
SETUP = """\
import os
import subprocess
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class Nvcc(build_ext):
    def build_extension(self, extension):
        library = self.get_ext_fullpath(extension.name)
        os.makedirs(os.path.dirname(library), exist_ok=True)
        numbers = [item.replace(".", "") for item in os.environ["CAPABILITIES"].split()]
        code = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
        subprocess.run([os.environ["CUDA_HOME"] + "/bin/nvcc", "-shared", "-cudart", "shared", "-Xcompiler", "-fPIC",
                        "-Xlinker", "--strip-all", "-I" + sysconfig.get_path("include"), *code, "-o", library,
                        *extension.sources], check=True)


setup(name="kernel", version="1.0", ext_modules=[Extension("kernel", ["kernel.cu"])], cmdclass={"build_ext": Nvcc})
"""


@pytest.fixture
def chain(recipe_folder: RecipeFolder) -> ResolvedRecipe:
    (recipe_folder.path / "images/kernel.def").write_text(LAYER)
    (recipe_folder.path / "files").mkdir()
    (recipe_folder.path / "files/kernel.cu").write_text(KERNEL)
    (recipe_folder.path / "files/setup.py").write_text(SETUP)
    (recipe_folder.path / "files/install_wheel.py").write_bytes((ROOT / "images/scripts/install_wheel.py").read_bytes())
    recipe_folder.top("kernel")
    return resolve(find_recipe(str(recipe_folder.path)), gpu_arch="8.0,9.0")


def built(chain: ResolvedRecipe, store: Store) -> tuple[Image, StoredResult]:
    image = build(BuildContext(chain, store, Options(engine="apptainer"), Progress(quiet=True)))
    (stage,) = wheels_of(chain).values()
    result = store.result(stage.cache_key)
    assert result is not None
    return image, result


def forget(store: Store, image: Image, result: StoredResult) -> None:
    (store.root / "results" / f"{result.key}.json").unlink()
    for layer in image.layers:
        if layer.name == "kernel":
            (store.root / "keys" / f"{layer.cache_key}.json").unlink()


def test_extension_is_compiled_with_nvcc(chain: ResolvedRecipe, workspace: Workspace, tmp_path: Path) -> None:
    store = Store(workspace.store(ME, "toolkit"))
    image, result = built(chain, store)
    assert [layer.name for layer in image.layers] == [
        "base",
        "python",
        "compiler",
        "pytorch",
        "kernel",
        chain.recipe.name,
    ]
    assert list(result.notes["extensions"].values()) == [["sm_80", "sm_90"]]
    (handed,) = result.files
    wheel = tmp_path / Path(handed.path).name
    wheel.write_bytes(store.blob_path(handed.digest).read_bytes())
    (extension,) = read_wheel(wheel, "kernel", result.inputs).values()
    assert "libcudart.so.13" in extension.library.needed
    assert "PyInit_kernel" in extension.library.defined

    forget(store, image, result)
    again, second = built(chain, store)
    assert second.files == result.files
    assert [layer.diff_id for layer in again.layers] == [layer.diff_id for layer in image.layers]
    listed = json.loads((store.root / "results" / f"{second.key}.json").read_text())
    assert listed["inputs"]["tools"][0][0] == "toolkit"
