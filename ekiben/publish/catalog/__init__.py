"""A shared folder (ekiben/publish/publish.py) as pages to read: static HTML and JSON, for a web server or straight from
the disk.

    OUT/ index.html            every image images/<name>.html    one image: how to run it and where, what is inside, its
        runs, its versions and their changes catalog.json          all of that

catalog.json; what is not known is null or empty:

    format       2
    shared_dir   the folder
    images       by name: name, description; recipe; current (the stem `current` names), shown (the stem the page is
                 about); commands: title, description, lines; versions, newest first: stem, version, stack, description,
                 file, sha256, size, sif, image, tasks, environment, checks, published, by as in the version's record
                 tags, pinned, signature sbom         the CycloneDX file beside it layers       name, cache_key,
                 diff_id, digest, size, tar_size, bottom first drift        what could not be had as locked, a line each
                 read_error   why what follows is not known, where it is not python, debian     packages and their
                 versions; glibc, torch, cuda: versions device_code  architectures that its torch (or else any of its
                 libraries) has machine code or PTX for gpus         family, models, capability; level: ok, info,
                 warning or error; message driver       minimum: the oldest that runs its CUDA; toolkit: the one that
                 CUDA came with changes      since the version before of the same stack: before, size (of both), layers,
                 packages, environment, files runs         id and what ekiben/publish/catalog/runs.py keeps of a run
    skipped      records that could not be read: file, reason

The same shared folder gives the same bytes. The pages are written beside OUT, which is then replaced by rename.

write    Write all of it: ``make_catalog``.
gather   Collect what catalog.json says.
pages    Render the pages from that.
runs     Keep run records with the versions they used.
curves   Keep the losses of a run as few points.
"""

__all__ = ["curves", "gather", "pages", "runs", "write"]
