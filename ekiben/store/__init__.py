"""The content-addressed store of layers and images: the user's own, one that colleagues share, and layers in a
registry.

Store, default_root          a store in a folder, by default the user's own
StoredLayer, StoredResult, StageOutput, ImageRecord, CompileStats
                             what it keeps, by cache key
LayerHandle, bind_layers     a layer with the store that holds it, for executors and image writers
LayerProvider, fetch_layer   where layers are looked up, in order
Image, known_sif, keep_sif   a finished image, and the digests of its SIFs
check_sif, note_sif          whether a SIF file is an image's, byte for byte
sif_sha256                   its SHA-256, computed once while the file is unchanged
known_sif_sha256             the same where it was computed before, else ""
prune, damaged_records       remove what no image needs
reachable                    what images need
shared                       the store that many users read and some write
remote                       layers in a registry; brings an HTTP client
"""

from ekiben.store._records import CompileStats, ImageRecord, StageOutput, StoredLayer, StoredResult
from ekiben.store.gc import damaged_records, prune, reachable
from ekiben.store.image import Image, keep_sif, known_sif
from ekiben.store.layers import LayerHandle, LayerProvider, bind_layers, fetch_layer
from ekiben.store.sif_check import check_sif, is_noted, known_sif_sha256, note_sif, sif_sha256
from ekiben.store.store import Store, default_root

__all__ = [
    "CompileStats",
    "Image",
    "ImageRecord",
    "LayerHandle",
    "LayerProvider",
    "StageOutput",
    "Store",
    "StoredLayer",
    "StoredResult",
    "bind_layers",
    "check_sif",
    "damaged_records",
    "default_root",
    "fetch_layer",
    "is_noted",
    "keep_sif",
    "known_sif",
    "known_sif_sha256",
    "note_sif",
    "prune",
    "reachable",
    "remote",
    "shared",
    "sif_sha256",
]
