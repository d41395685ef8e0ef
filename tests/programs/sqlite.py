"""Has two SQLite databases open: `rollback`, and `wal`, which has a write-ahead log and is in a volume.

Over TCP port 7000 each line is the name of a database. A transaction on the connection that has been open from the beginning
must keep one that is new from writing, and both add a row. The answer is the number of rows, or what went wrong.
"""

import socket
import sqlite3


PATHS = {"rollback": "/rollback.db", "wal": "/data/wal.db"}


def connect(name):
    return sqlite3.connect(PATHS[name], timeout=0, isolation_level=None)


def make(name, mode):
    connection = connect(name)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute("CREATE TABLE rows (row)")
    return connection


def add(connection):
    connection.execute("INSERT INTO rows VALUES (zeroblob(1000))")


def write(kept, name):
    new = connect(name)
    kept.execute("BEGIN IMMEDIATE")
    add(kept)
    try:
        add(new)
        return "the new connection has written beside a transaction"
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise
    kept.execute("COMMIT")
    add(new)
    if new.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
        return "the database is damaged"
    return kept.execute("SELECT count(*) FROM rows").fetchone()[0]


def main():
    databases = {name: make(name, mode) for name, mode in {"rollback": "delete", "wal": "wal"}.items()}
    # What another program than SQLite would have open, and what is no database.
    other = open("/other.db", "w+b")
    other.write(b"SQLite format 3\0" + bytes(100))
    other.flush()
    none = open("/none.db", "w+b")
    none.write(b"SQLite format 4\0" + bytes(100))
    none.flush()
    with socket.create_server(("0.0.0.0", 7000)) as listener:
        client = listener.accept()[0]
    for line in client.makefile():
        name = line.strip()
        try:
            answer = write(databases[name], name)
        except sqlite3.Error as error:
            answer = error
        client.sendall(f"{answer}\n".encode())


main()
