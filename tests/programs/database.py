"""Writes into large files all the time, as a database does, and knows what must be in them.

Over TCP port 7000 each line is a request for a check, which reads all files and is answered with
`right` and the number of writes, or with what is wrong. Between requests it writes blocks at random
places of a table, appends to a log, and gives logs the names of older ones.
"""

import os
import random
import selectors
import socket

BLOCK, TABLE, LOG = 4096, 64 << 20, 8 << 20
DIRECTORY = "/data"


class Database:
    def __init__(self):
        os.makedirs(DIRECTORY, exist_ok=True)
        os.chdir(DIRECTORY)
        self.writes = 0
        self.blocks = [0] * (TABLE // BLOCK)
        with open("table", "wb") as file:
            for number in range(len(self.blocks)):
                file.write(self.block(number, 0))
        self.table = os.open("table", os.O_RDWR)
        self.logs = []
        self.new_log()

    def block(self, number, write):
        return b"%016x%016x" % (number, write) * (BLOCK // 32)

    def new_log(self):
        # The oldest one gets a new name, and is written over.
        name = f"log {self.writes}"
        if len(self.logs) == 3:
            os.rename(self.logs.pop(0)[0], name)
        self.log = os.open(name, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self.log, LOG)
        self.logs.append((name, []))

    def write(self):
        self.writes += 1
        number = random.randrange(len(self.blocks))
        self.blocks[number] = self.writes
        os.pwrite(self.table, self.block(number, self.writes), number * BLOCK)
        lines = self.logs[-1][1]
        os.pwrite(self.log, self.block(number, self.writes), len(lines) * BLOCK)
        lines.append((number, self.writes))
        if len(lines) == 500:
            os.close(self.log)
            self.new_log()

    def check(self):
        with open("table", "rb") as file:
            for number, write in enumerate(self.blocks):
                if file.read(BLOCK) != self.block(number, write):
                    return f"block {number} of the table is not that of write {write}"
        for name, lines in self.logs:
            with open(name, "rb") as file:
                for number, write in lines:
                    if file.read(BLOCK) != self.block(number, write):
                        return f"{name} lacks write {write}"
        wrong = set(os.listdir()) - {"table"} ^ {name for name, _ in self.logs}
        return f"files too many or missing: {wrong}" if wrong else f"right {self.writes}"


def main():
    database = Database()
    with socket.create_server(("0.0.0.0", 7000)) as listener:
        connection = listener.accept()[0]
    requests = connection.makefile()
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    while True:
        if not selector.select(0.004):
            database.write()
        elif requests.readline():
            connection.sendall(database.check().encode() + b"\n")
        else:
            return


main()
