"""Says that it is CRIU 4.0 where it is asked over RPC, and becomes the CRIU that it is given for all else.

    older.py CRIU ARGUMENT...
"""

import os
import socket
import sys

# CRIU's messages, as its rpc.proto has them: a request of the type VERSION, and the answer to it.
VERSION = b"\x08\x0a"
ANSWER = VERSION + b"\x10\x01" + b"\x52\x04\x08\x04\x10\x00"

criu, arguments = sys.argv[1], sys.argv[2:]
if arguments[:1] == ["swrk"]:
    asked = socket.socket(fileno=os.dup(int(arguments[1])))
    if asked.recv(len(VERSION) + 1, socket.MSG_PEEK) == VERSION:
        # What is left unread would reset the connection.
        asked.recv(len(VERSION))
        asked.send(ANSWER)
        sys.exit()
os.execv(criu, [criu, *arguments])
