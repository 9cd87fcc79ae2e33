"""Read the content of an image of the store, or of a SIF file.

describe       What it is made of.
diff           How two images differ.
text           Both of these for a terminal.
sbom           Its SBOM, CycloneDX.
image_info     What an image says of itself, also of a SIF.
licenses       Licences of packages as SPDX has them.
image_reader   Its layers, files and packages.
metadata       Of which recipe and layers it says that it is.
"""

__all__ = ["describe", "diff", "image_info", "image_reader", "licenses", "metadata", "sbom", "text"]
