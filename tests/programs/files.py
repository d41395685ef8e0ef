"""Changes the files of its container in every way there is, and describes them when asked.

Over TCP port 7000 each line is a request: `describe` is answered with one line of JSON, the
description of every file of the root filesystem; `change` makes changes as a move might meet them
in its middle, and is answered with `done`; `open` tells what is in files that are open but have
no name any more.
"""

import hashlib
import json
import os
import shutil
import socket
import stat

ROOT = "/data"
SKIPPED = ["/proc", "/sys", "/dev"]
# Files that each node makes anew for the containers on it.
PROVIDED = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"]
# Here CRIU makes names for a moment at a restore: those of sockets, and of files without one.
TOUCHED = ["/data/open"]


def write(path, content, mode=0o644):
    with open(path, "wb") as file:
        file.write(content)
    os.chmod(path, mode)


def describe():
    """Every file below the root, by path. Names of one file share a number."""
    found, numbers = {}, {}

    def look(path):
        status = os.lstat(path)
        kind = stat.S_IFMT(status.st_mode)
        entry = {
            "mode": oct(status.st_mode),
            "owner": [status.st_uid, status.st_gid],
            "xattrs": {
                name: os.getxattr(path, name, follow_symlinks=False).hex()
                for name in sorted(os.listxattr(path, follow_symlinks=False))
            },
        }
        if kind != stat.S_IFSOCK and path not in PROVIDED + TOUCHED:
            entry["time"] = status.st_mtime_ns
        if kind == stat.S_IFREG:
            with open(path, "rb") as file:
                entry["content"] = hashlib.sha256(file.read()).hexdigest()
            entry["size"] = status.st_size
            entry["holes"] = status.st_blocks * 512 < status.st_size // 2
        if kind == stat.S_IFLNK:
            entry["target"] = os.readlink(path)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):
            entry["device"] = [os.major(status.st_rdev), os.minor(status.st_rdev)]
        if kind != stat.S_IFDIR:
            entry["names"] = status.st_nlink
            if status.st_nlink > 1:
                entry["same"] = numbers.setdefault((status.st_dev, status.st_ino), path)
        found[os.fsencode(path).decode("latin-1")] = entry
        if kind == stat.S_IFDIR:
            for name in sorted(os.listdir(path)):
                below = os.path.join(path, name)
                if below not in SKIPPED:
                    look(below)

    look("/")
    return found


def begin():
    os.chdir(ROOT)
    os.mkdir("open")
    write("changed", b"changed\n")
    with open("appended", "ab") as file:
        file.write(b"more\n")
    os.unlink("deleted")
    shutil.rmtree("directory deleted")
    # Deleted and made again: nothing of the old one may shine through.
    shutil.rmtree("directory replaced")
    os.mkdir("directory replaced")
    write("directory replaced/new", b"new")
    # A file takes the place of a directory, and the other way round.
    shutil.rmtree("directory to file")
    write("directory to file", b"a file now")
    os.unlink("file to directory")
    os.mkdir("file to directory")
    write("file to directory/inside", b"x")
    os.rename("renamed", "new name")
    os.chmod("mode", 0o4711)
    os.chown("owner", 1234, 4321)
    os.utime("time", ns=(10**18, 1234567890123456789))
    os.symlink("/nowhere at all", "dangling")
    os.unlink("link")
    os.symlink("appended", "link")
    write("linked 1", b"one file, three names")
    os.link("linked 1", "linked 2")
    os.mkdir("links", 0o2775)
    os.link("linked 1", "links/linked 3")
    os.link("old name", "another name")
    write("attributes", b"")
    os.setxattr("attributes", "user.colour", b"green\0and blue")
    os.setxattr("directory kept", "user.on", b"a directory")
    os.mkdir("directory made")
    write("directory made/inside", b"moves with it")
    os.mkfifo("fifo", 0o640)
    server = socket.socket(socket.AF_UNIX)
    server.bind("open/socket")
    with open("sparse", "wb") as file:
        file.truncate(64 << 20)
        file.seek(20 << 20)
        file.write(b"an island" * 1000)
    write("large", os.urandom(3 << 20))
    write("empty", b"")
    write("caps", b"#!/bin/sh\n", 0o755)
    # cap_net_bind_service+ep, in the kernel's form.
    os.setxattr("caps", "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
    write(b"not \xff UTF-8", b"a name of any bytes")
    write("n" * 255, b"a long name")
    deep = "deep"
    for _ in range(40):
        os.mkdir(deep)
        deep += "/d"
    return server


class Open:
    """Files that are open over the moves."""

    def __init__(self):
        self.deleted = open("open/deleted but open", "w+b")
        self.deleted.write(b"still here" * 100)
        self.deleted.flush()
        os.unlink("open/deleted but open")
        # One that is read in the middle, whose name stays.
        self.lower = open("open in the layer", "rb")
        self.start = self.lower.read(5)
        # Replaced under its name by another file.
        write("open/replaced", b"the first")
        self.replaced = open("open/replaced", "rb")
        write("open/replacement", b"another file")
        os.rename("open/replacement", "open/replaced")
        # Opened by a name that was deleted, while it has another.
        write("open/other name", b"begun\n")
        os.link("open/other name", "open/first name")
        self.linked = open("open/first name", "ab", buffering=0)
        os.unlink("open/first name")
        self.appending = open("open/log", "ab", buffering=0)
        self.lines = 0

    def check(self):
        self.lines += 1
        self.appending.write(b"line %d\n" % self.lines)
        self.linked.write(b"line %d\n" % self.lines)
        with open("open/other name", "rb") as other:
            linked = other.read().splitlines()
        with open("open/log", "rb") as log:
            lines = log.read().splitlines()
        rest = self.lower.read()
        self.lower.seek(5)
        self.replaced.seek(0)
        self.deleted.seek(0)
        return {
            "deleted": self.deleted.read().decode() == "still here" * 100,
            "lower": (self.start + rest).decode(),
            "replaced": self.replaced.read().decode(),
            "linked": linked[0] == b"begun" and linked[1:] == lines and os.fstat(self.linked.fileno()).st_nlink == 1,
            "log": lines == [b"line %d" % (n + 1) for n in range(self.lines)],
        }


def change(number):
    write(f"after {number}", b"%d" % number)
    if number > 1:
        os.unlink(f"after {number - 1}")
    with open("large", "r+b") as file:
        file.seek(number << 16)
        file.write(b"x")
    names = ["directory made", "directory moved"]
    os.rename(names[1 - number % 2], names[number % 2])
    os.chmod("mode", 0o600 + number % 8)


def main():
    server = begin()
    opened = Open()
    changes = 0
    with socket.create_server(("0.0.0.0", 7000)) as listener:
        connection = listener.accept()[0]
    for line in connection.makefile():
        if line == "describe\n":
            answer = json.dumps(describe())
        elif line == "open\n":
            answer = json.dumps(opened.check())
        else:
            changes += 1
            change(changes)
            answer = '"done"'
        connection.sendall(answer.encode() + b"\n")


main()
