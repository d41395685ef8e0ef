"""Watches files with inotify(7), and tells what happened to them.

Over TCP port 7000 each line is a request: `touch PATH` appends to a file, and is answered with one line
of JSON, the watches and names of the events that came of it.
"""

import ctypes
import json
import os
import socket
import struct

MODIFY = 0x2
LIBC = ctypes.CDLL(None, use_errno=True)


def watch(path):
    number = LIBC.inotify_add_watch(queue, path.encode(), MODIFY)
    assert number > 0, os.strerror(ctypes.get_errno())
    return number


def events():
    found, data = [], os.read(queue, 65536)
    while data:
        number, _, _, length = struct.unpack_from("iIII", data)
        name = data[16 : 16 + length].rstrip(b"\0").decode()
        found.append([names[number], name])
        data = data[16 + length :]
    return found


os.makedirs("/data/directory")
for name in ["/data/directory/a", "/data/before"]:
    open(name, "w").close()
queue = LIBC.inotify_init()
names = {watch(path): path for path in ["/data/directory", "/data/before", "/layer"]}
# Its watch goes on under the new name.
os.rename("/data/before", "/data/after")

listener = socket.create_server(("0.0.0.0", 7000))
connection = listener.accept()[0].makefile("rw")
for line in connection:
    with open(line.split()[1], "a") as file:
        file.write("x")
    connection.write(json.dumps(events()) + "\n")
    connection.flush()
