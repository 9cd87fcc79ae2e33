"""A client of OCI registries.

reference   Names of images: ``Reference``.
client      Manifests, blobs, uploads, referrers of one repository: ``Registry``.
layers      Layers of a registry's image, downloaded and unpacked.
manifest    What a registry answers: ``Manifest``, ``Descriptor``, ``ImageConfig``.
session     HTTP requests with retries and tokens (for tests).
auth        Credentials that other programs keep.
"""

__all__ = ["auth", "client", "layers", "manifest", "reference", "session"]
