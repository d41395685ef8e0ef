"""A program that uses much of what a process can have, and checks all of it while it runs.

Each activity counts its rounds. Over TCP port 7000, `check` answers when every activity has done
five more rounds, or says which has not; `end` closes what was kept pending since the start and
answers with what came of it. An activity that sees anything wrong reports it with the next answer.
"""

import array
import ctypes
import fcntl
import json
import mmap
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROUNDS = 5
PATIENCE = 120.0
COUNT = {}
PROBLEMS = []
LOCAL = threading.local()


def problem(text):
    PROBLEMS.append(text)
    print(text, file=sys.stderr, flush=True)


def count(name):
    COUNT[name] = COUNT.get(name, 0) + 1


def activity(name):
    """Runs a function again and again on a thread of its own; it gets the number of the round."""

    def start(work):
        def loop():
            LOCAL.name = name
            try:
                number = 0
                while True:
                    work(number)
                    number += 1
                    count(name)
                    if LOCAL.name != name:
                        problem(f"{name}: the thread-local value is {LOCAL.name}")
            except BaseException as error:
                problem(f"{name}: {error!r}")

        COUNT[name] = 0
        threading.Thread(target=loop, name=name, daemon=True).start()
        return work

    return start


def same(what, seen, expected):
    if seen != expected:
        raise AssertionError(f"{what}: {seen!r} instead of {expected!r}")


def exactly(receive, length):
    data = b""
    while len(data) < length:
        part = receive(length - len(data))
        if not part:
            raise EOFError(f"{len(data)} of {length} bytes")
        data += part
    return data


def echo(connection):
    """Sends back what comes, on a thread."""

    def loop():
        try:
            while data := connection.recv(65536):
                connection.sendall(data)
        except OSError as error:
            problem(f"echo: {error!r}")

    threading.Thread(target=loop, daemon=True).start()


# Before there are threads, whose descriptors it would share.
shared = mmap.mmap(-1, 4096)
brother = os.fork()
if brother == 0:
    while True:
        shared[:8] = struct.pack("<Q", struct.unpack("<Q", shared[:8])[0] + 1)
        time.sleep(0.002)


# Timers: two signals, a chain of threading.Timer, sleeping, and (below) a timerfd.
def alarmed(_signal, _frame):
    count("setitimer")


COUNT["setitimer"] = 0
signal.signal(signal.SIGALRM, alarmed)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)


def timer_fired():
    count("threading.Timer")
    start_timer()


def start_timer():
    timer = threading.Timer(0.01, timer_fired)
    timer.daemon = True
    timer.start()


COUNT["threading.Timer"] = 0
start_timer()

libc = ctypes.CDLL(None, use_errno=True)
COUNT["timer_create"] = 0
signal.signal(signal.SIGRTMIN, lambda *_: count("timer_create"))
# A sigevent with value 0, this signal, and SIGEV_SIGNAL; then 10 ms and an interval of 10 ms.
timer_id = ctypes.c_void_p()
event = struct.pack("<Qii48x", 0, signal.SIGRTMIN, 0)
interval = struct.pack("<qqqq", 0, 10_000_000, 0, 10_000_000)
if libc.timer_create(1, event, ctypes.byref(timer_id)) or libc.timer_settime(timer_id, 0, interval, None):
    problem(f"timer_create: {os.strerror(ctypes.get_errno())}")
clock = [0.0, 0.0]


@activity("clocks")
def clocks(_number):
    now = [time.monotonic(), time.time()]
    if now[0] < clock[0] or now[1] < clock[1] - 1:
        problem(f"clocks went back from {clock} to {now}")
    clock[:] = now
    time.sleep(0.002)


# Threads that wait for each other.
turns = [threading.Semaphore(1), threading.Semaphore(0)]


@activity("ping")
def ping(_number):
    turns[0].acquire()
    time.sleep(0.001)
    turns[1].release()


@activity("pong")
def pong(_number):
    turns[1].acquire()
    turns[0].release()


HARMONIC = sum(1.0 / n for n in range(1, 100))


@activity("arithmetic")
def arithmetic(number):
    value = 1
    for _ in range(2000):
        value = value * 6364136223846793005 + 1442695040888963407 + number & (1 << 64) - 1
    same("a float", sum(1.0 / n for n in range(1, 100)), HARMONIC)
    time.sleep(0.001)


# Sockets and pipes.
pair = socket.socketpair()
echo(pair[1])


@activity("socket pair")
def socket_pair(number):
    message = struct.pack("<Q", number) * 500
    pair[0].sendall(message)
    same("the socket pair", exactly(pair[0].recv, len(message)), message)
    time.sleep(0.001)


datagrams = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@activity("packets")
def packets(number):
    for length in (1, 10, 100):
        datagrams[0].send(bytes([number % 256]) * length)
    for length in (1, 10, 100):
        same("a packet", datagrams[1].recv(1000), bytes([number % 256]) * length)
    time.sleep(0.001)


loop_listener = socket.create_server(("127.0.0.1", 0))
loop_client = socket.create_connection(loop_listener.getsockname())
echo(loop_listener.accept()[0])


@activity("TCP on lo")
def tcp_on_lo(number):
    message = struct.pack("<Q", number) * 2000
    loop_client.sendall(message)
    same("TCP on lo", exactly(loop_client.recv, len(message)), message)
    time.sleep(0.001)


udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))


@activity("UDP on lo")
def udp_on_lo(number):
    # A datagram may get lost, as everywhere; it is sent again until one is there.
    while True:
        udp.sendto(struct.pack("<Q", number), udp.getsockname())
        if select.select([udp], [], [], 0.5)[0]:
            break
    while select.select([udp], [], [], 0)[0]:
        same("UDP on lo", udp.recv(100), struct.pack("<Q", number))
    time.sleep(0.001)


path = tempfile.mkdtemp() + "/named"
unix_listener = socket.socket(socket.AF_UNIX)
unix_listener.bind(path)
unix_listener.listen()


@activity("unix connections")
def unix_connections(number):
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    server = unix_listener.accept()[0]
    server.sendall(b"%d\n" % number)
    same("a unix connection", client.recv(100), b"%d\n" % number)
    client.close()
    server.close()
    time.sleep(0.001)


pipe = os.pipe()


@activity("pipe writer")
def pipe_writer(number):
    os.write(pipe[1], struct.pack("<Q", number))
    time.sleep(0.001)


@activity("pipe reader")
def pipe_reader(number):
    same("the pipe", struct.unpack("<Q", exactly(lambda n: os.read(pipe[0], n), 8))[0], number)


# Other processes; they are made by vfork(2), in which CRIU cannot dump their parent.
child = subprocess.Popen(
    [sys.executable, "-u", "-c", "import sys\nfor line in sys.stdin: print(int(line) ** 2, flush=True)"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
)


@activity("subprocess")
def subprocess_answers(number):
    child.stdin.write(b"%d\n" % number)
    child.stdin.flush()
    same("the subprocess", child.stdout.readline(), b"%d\n" % number**2)
    time.sleep(0.001)


@activity("short processes")
def short_processes(number):
    ended = subprocess.run([sys.executable, "-S", "-c", f"raise SystemExit({number % 100})"])
    same("an exit code", ended.returncode, number % 100)
    time.sleep(0.02)


@activity("shared memory")
def shared_memory(_number):
    before = shared[:8]
    deadline = time.monotonic() + PATIENCE
    while shared[:8] == before:
        if time.monotonic() > deadline:
            raise AssertionError("the other process does not count")
        time.sleep(0.001)


# Files.
scratch = tempfile.TemporaryFile()
locked_path = tempfile.mktemp()
locked = open(locked_path, "w")
fcntl.flock(locked, fcntl.LOCK_EX)
mapped_file = open(tempfile.mktemp(), "w+b")
mapped_file.truncate(8192)
mapped = mmap.mmap(mapped_file.fileno(), 8192)


@activity("files")
def files(number):
    scratch.seek(number % 100 * 4096)
    scratch.write(struct.pack("<Q", number))
    scratch.flush()
    same("a deleted file", os.pread(scratch.fileno(), 8, number % 100 * 4096), struct.pack("<Q", number))
    mapped[4096:4104] = struct.pack("<Q", number)
    same("a mapped file", os.pread(mapped_file.fileno(), 8, 4096), struct.pack("<Q", number))
    time.sleep(0.001)


@activity("lock")
def lock(_number):
    with open(locked_path, "w") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.002)
            return
    raise AssertionError("a lock that is held was given again")


# What stays pending until the end.
held_pipe = os.pipe()
PENDING = os.urandom(50000)
os.write(held_pipe[1], PENDING)
carrier = socket.socketpair()
carried = os.pipe()
carrier[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [carried[0]]))])
os.close(carried[0])
os.write(carried[1], b"carried")
data = {number: os.urandom(100) for number in range(20000)}
DIGEST = hash(tuple(data.items()))
received = []
signal.signal(signal.SIGUSR1, lambda *_: received.append("USR1"))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
os.chdir("/tmp")
os.umask(0o027)


def end():
    same("a pipe full of data", exactly(lambda n: os.read(held_pipe[0], n), len(PENDING)), PENDING)
    _, ancillary, _, _ = carrier[1].recvmsg(1, socket.CMSG_SPACE(4))
    passed = array.array("i", ancillary[0][2])[0]
    same("a descriptor in a socket", os.read(passed, 100), b"carried")
    same("the data", hash(tuple(data.items())), DIGEST)
    same("the pending signal", received, [])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    same("the signal", received, ["USR1"])
    same("the directory", os.getcwd(), "/tmp")
    same("the umask", os.umask(0), 0o027)
    same("the subprocess", child.poll(), None)
    return {"threads": threading.active_count(), "pid": os.getpid(), "problems": PROBLEMS}


# The main thread: an epoll loop over a timerfd, an eventfd, a queue's pipe, and the connection.
timerfd = libc.timerfd_create(1, 0)
if timerfd < 0 or libc.timerfd_settime(timerfd, 0, interval, None) != 0:
    problem(f"timerfd: {os.strerror(ctypes.get_errno())}")
eventfd = os.eventfd(0)
COUNT["timerfd"] = COUNT["eventfd"] = 0
jobs = queue.Queue()


@activity("event writer")
def event_writer(_number):
    os.eventfd_write(eventfd, 1)
    time.sleep(0.002)


def check():
    goals = {name: number + ROUNDS for name, number in COUNT.items()}
    return goals, time.monotonic() + PATIENCE


def main():
    server = socket.create_server(("0.0.0.0", 7000))
    epoll = select.epoll()
    for descriptor in (timerfd, eventfd, server.fileno()):
        epoll.register(descriptor, select.EPOLLIN)
    connection, goals, deadline = None, None, 0.0

    def answer(value):
        connection.sendall(json.dumps(value).encode() + b"\n")

    print("ready", flush=True)
    while True:
        for descriptor, _events in epoll.poll():
            if descriptor == timerfd:
                os.read(timerfd, 8)
                count("timerfd")
            elif descriptor == eventfd:
                os.eventfd_read(eventfd)
                count("eventfd")
            elif descriptor == server.fileno():
                connection = server.accept()[0]
                epoll.register(connection.fileno(), select.EPOLLIN | select.EPOLLET)
            elif request := connection.recv(1000):
                if request == b"check\n":
                    goals, deadline = check()
                elif request == b"end\n":
                    answer(end())
                else:
                    problem(f"a request of {request!r}")
            else:
                problem("the connection was closed")
                return
        if goals is not None:
            slow = [name for name, goal in goals.items() if COUNT[name] < goal]
            if PROBLEMS or not slow or time.monotonic() > deadline:
                answer({"slow": slow, "problems": PROBLEMS, "rounds": sum(COUNT.values())})
                goals = None


try:
    main()
except BaseException as error:
    problem(f"the main thread: {error!r}")
    raise
