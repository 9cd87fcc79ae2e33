"""Which package brings a module of Python, or a shared library, that an import did not have."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MISSING = re.compile(r"\bModuleNotFoundError: No module named '([A-Za-z_][\w.]*)'")
_NO_LIBRARY = re.compile(r"\b(?:ImportError|OSError): (lib[\w.+-]+\.so[\w.]*): cannot open shared object file")

DISTRIBUTIONS = {  # of modules whose distribution has another name
    "attr": "attrs",
    "Bio": "biopython",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "PyMuPDF",
    "flash_attn": "flash-attn",
    "git": "GitPython",
    "google.protobuf": "protobuf",
    "hydra": "hydra-core",
    "igraph": "python-igraph",
    "jose": "python-jose",
    "jwt": "PyJWT",
    "lightning_fabric": "lightning-fabric",
    "magic": "python-magic",
    "MeCab": "mecab-python3",
    "mpl_toolkits": "matplotlib",
    "OpenSSL": "pyOpenSSL",
    "osgeo": "GDAL",
    "PIL": "pillow",
    "pkg_resources": "setuptools<81",
    "psycopg2": "psycopg2-binary",
    "pynvml": "nvidia-ml-py",
    "pytorch_lightning": "pytorch-lightning",
    "ruamel": "ruamel.yaml",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "slugify": "python-slugify",
    "umap": "umap-learn",
    "usb": "pyusb",
    "websocket": "websocket-client",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}
_LIBRARIES = {  # Debian's packages of libraries that wheels expect of the system
    "libGL.so.1": "libgl1",
    "libEGL.so.1": "libegl1",
    "libSM.so.6": "libsm6",
    "libXext.so.6": "libxext6",
    "libXrender.so.1": "libxrender1",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libgthread-2.0.so.0": "libglib2.0-0",
    "libgomp.so.1": "libgomp1",
    "libsndfile.so.1": "libsndfile1",
    "libpq.so.5": "libpq5",
}


def explain_import(lines: Iterable[str]) -> tuple[str, str] | None:
    """Return what the last failed import among lines of output lacked, a sentence, and the arguments of `ekiben add`
    that bring it, "" where none do; None where no import failed.
    """
    for line in reversed([*lines]):
        if match := _MISSING.search(line):
            return _explain_module(match[1])
        if match := _NO_LIBRARY.search(line):
            package = _LIBRARIES.get(match[1], "")
            return f"the image has no {match[1]}", package and f"--apt {package}"
    return None


def _explain_module(module: str) -> tuple[str, str]:
    top = module.partition(".")[0]
    distribution = DISTRIBUTIONS.get(module) or ("" if module != top else DISTRIBUTIONS.get(top, top))
    if not distribution:  # Python names the first module that it does not find
        return f"the image's version of {top} has no module {module}", ""
    shown = "" if distribution.replace("-", "_").lower() == top.lower() else f", of the package {distribution}"
    return f"the image has no module {module}{shown}", distribution
