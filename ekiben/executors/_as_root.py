"""Run a command as root of a user namespace that has this user's subordinate ids, and of a mount namespace in it.

`python _as_root.py UIDS GIDS COMMAND...`, where UIDS and GIDS are START:COUNT of /etc/subuid and /etc/subgid. Since
2.38 util-linux' `unshare --map-auto` does the same; EL9 and Ubuntu 22.04 have older ones. Stands alone: it is run, not
imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys

NEW_USER, NEW_MOUNTS = 0x1000_0000, 0x0002_0000  # Linux, include/uapi/linux/sched.h: CLONE_NEWUSER, CLONE_NEWNS


def main(uids: str, gids: str, command: list[str]) -> None:
    """Become root and the command. Exits with 71 where that is not possible."""
    process = os.getpid()
    waits, goes = os.pipe()
    child = os.fork()
    if child == 0:  # stays outside: only there are newuidmap and newgidmap root's
        os.close(goes)
        os._exit(0 if os.read(waits, 1) and _map(process, uids, gids) else 1)
    os.close(waits)
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(NEW_USER | NEW_MOUNTS):
        sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
    os.write(goes, b"1")
    os.close(goes)
    if os.waitpid(child, 0)[1]:
        sys.exit(71)
    with contextlib.suppress(OSError):
        os.setgroups([])
    os.execvp(command[0], command)


def _map(process: int, uids: str, gids: str) -> bool:
    for program, identity, ids in (("newuidmap", os.getuid(), uids), ("newgidmap", os.getgid(), gids)):
        start, count = ids.split(":")
        done = subprocess.run([program, str(process), "0", str(identity), "1", "1", start, count], check=False)
        if done.returncode:
            return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
