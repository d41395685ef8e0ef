#!/usr/bin/env python3
"""Draws docs/pictures/*.svg: python3 site/pictures.py. With --check it fails if one of them is not what it would draw.

A picture is a function below. Lengths are in pixels; every picture is 760 wide.
"""

import os
import sys
from html import escape

PLACE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "docs", "pictures")
WIDTH = 760
INK, PALE, RUNS, FROZEN, PAGES, LIMIT, PAUSE, PLAIN = (
    "#1b2733", "#5b6b79", "#2f7d5b", "#8fa1b1", "#3d6ea5", "#b3402a", "#fdf3e3", "#eef2f5")
DARK = {RUNS, FROZEN, PAGES, LIMIT}


class Picture:
    """Shapes in the order in which they are drawn, and a title for who cannot see them."""

    def __init__(self, title, height):
        self.height = height
        self.parts = [f"<title>{escape(title)}</title>", f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>']

    def text(self, x, y, words, color=INK, anchor="start", bold=False, size=13):
        for number, line in enumerate(words.split("\n")):
            self.parts.append(
                f'<text x="{x}" y="{y + number * 17}" fill="{color}" font-size="{size}" text-anchor="{anchor}"'
                + (' font-weight="600"' if bold else "") + f">{escape(line)}</text>")

    def box(self, x, y, w, h, words="", fill=PLAIN, border=None, bold=False, top=False, dashed=False):
        """A rectangle with its words in the middle, or at its top left."""
        stroke = f' stroke="{border}" stroke-width="1.5"' if border else ""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}"{stroke}{dash}/>')
        color = "#ffffff" if fill in DARK else INK
        lines = words.count("\n") + 1
        if top:
            self.text(x + 10, y + 19, words, color, bold=bold)
        elif words:
            self.text(x + w / 2, y + h / 2 + 4.5 - (lines - 1) * 8.5, words, color, "middle", bold)

    def line(self, points, color=PALE, width=2, dashed=False, head=True):
        """Lines from point to point, with an arrow head at the last."""
        path = " L".join(f"{x} {y}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="{width}"{dash}/>')
        if head:
            (x0, y0), (x1, y1) = points[-2:]
            length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
            dx, dy = (x1 - x0) / length, (y1 - y0) / length
            sides = [(x1 - 9 * dx + s * 4.5 * dy, y1 - 9 * dy - s * 4.5 * dx) for s in (1, -1)]
            corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x1, y1), *sides])
            self.parts.append(f'<polygon points="{corners}" fill="{color}"/>')

    def svg(self):
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}"'
                ' font-family="system-ui, sans-serif" font-size="13">')
        return "\n  ".join([head, *self.parts]) + "\n</svg>\n"


def sequence(title, lanes, rows, pause=None):
    """Messages between lanes, (name, x) each, from top to bottom.

    A row is (from, to, words, color), or (lane, words, color) for a box on a lane. `pause` has the first and the last
    row of the frozen time.
    """
    step, first = 40, 66
    picture = Picture(title, first + step * len(rows) - 4)
    at = lambda number: first + step * number
    if pause:
        picture.box(16, at(pause[0]) - 22, WIDTH - 32, (pause[1] - pause[0] + 1) * step, "", PAUSE)
        picture.text(24, at(pause[0]) - 6, "frozen", "#9a6412")
    for name, x in lanes:
        picture.line([(x, 40), (x, picture.height - 8)], "#c9d3dc", head=False)
        picture.box(x - 80, 12, 160, 28, name, bold=True)
    places = [x for _, x in lanes]
    for number, row in enumerate(rows):
        y = at(number)
        if len(row) == 4:
            begin, end, words, color = row
            x0, x1 = places[begin], places[end]
            side = 6 if x1 > x0 else -6
            picture.line([(x0 + side, y), (x1 - side, y)], color)
            picture.text((x0 + x1) / 2, y - 7, words, color, "middle")
        else:
            lane, words, color = row
            wide = max(len(line) for line in words.split("\n")) * 7.2 + 20
            picture.box(places[lane] - wide / 2, y - 17, wide, 30, words, color)
    return picture


def lab():
    p = Picture("A lab: nodes a and b and a client host as network namespaces of one machine, joined by a link", 236)
    p.box(16, 12, 728, 212, "your machine", PLAIN, PALE, top=True)
    for x, name in ((48, "node a"), (528, "node b")):
        p.box(x, 44, 184, 104, name, "#ffffff", PALE, top=True, bold=True)
        p.box(x + 20, 108, 144, 28, "godwitd")
    p.box(68, 72, 144, 30, "redis 10.88.0.10", RUNS)
    p.box(548, 72, 144, 30, "redis 10.88.0.10", "#ffffff", RUNS, dashed=True)
    p.line([(216, 87), (544, 87)], PAGES)
    p.text(380, 79, "godwit migrate redis --to b", PAGES, "middle")
    p.box(288, 164, 184, 44, "client", "#ffffff", PALE, bold=True)
    p.line([(140, 148), (140, 186), (288, 186)], FROZEN, head=False)
    p.line([(620, 148), (620, 186), (472, 186)], FROZEN, head=False)
    p.text(214, 178, "1 Gbit/s, 1 ms", PALE, "middle")
    p.text(546, 178, "1 Gbit/s, 1 ms", PALE, "middle")
    return p


def modes():
    p = Picture("When pages cross in each mode: before the freeze, while frozen, or after the resume", 306)
    p.box(360, 34, 90, 256, "", PAUSE)
    p.text(130, 24, "runs at the source", PALE)
    p.text(405, 24, "frozen", "#9a6412", "middle")
    p.text(470, 24, "runs at the destination", PALE)
    rows = [("cold", 0, 90, 0, "all pages"), ("precopy", 230, 34, 0, "rounds"), ("hybrid", 190, 30, 90, "rounds"),
            ("postcopy", 0, 22, 230, "")]
    for number, (mode, before, during, after, words) in enumerate(rows):
        y = 44 + number * 62
        p.text(24, y + 20, mode, bold=True)
        p.box(120, y, 240, 16, "", RUNS)
        p.box(450, y, 290, 16, "", RUNS)
        p.box(360, y, 90, 16, "", FROZEN)
        if before:
            parts = 3 if mode == "precopy" else 2
            x = 120 + 240 - before
            for part, share in enumerate((0.62, 0.24, 0.14)[:parts] if parts == 3 else (0.7, 0.3)):
                p.box(x, y + 20, before * share - 3, 18, "all pages" if part == 0 else "", PAGES)
                x += before * share
        wide = during
        p.box(360, y + 20, wide, 18, words if mode == "cold" else "", PAGES)
        if mode == "precopy":
            p.text(400, y + 34, "dirty", PAGES)
        if after:
            p.box(392 if mode == "hybrid" else 384, y + 20, after, 18, "the others", PAGES)
    return p


def pre_copy():
    p = Picture("Rounds: each sends the pages that were written during the one before, until the rest is small enough", 246)
    p.text(24, 28, "pages to send", PALE)
    x, heights = 60, (150, 74, 36, 18)
    for number, height in enumerate(heights):
        wide = max(height * 0.9, 40)
        p.box(x, 200 - height, wide, height, f"round {number + 1}" if number < 2 else str(number + 1), PAGES)
        x += wide + 30
        if number < 3:
            p.line([(x - 27, 190), (x - 4, 190)], LIMIT)
    p.line([(48, 200), (736, 200)], PALE)
    p.text(60, 222, "the service runs; its writes make pages dirty again", RUNS)
    p.box(x + 4, 60, 104, 140, "", PAUSE)
    p.text(x + 56, 52, "frozen", "#9a6412", "middle")
    p.box(x + 12, 190, 24, 10, "", PAGES)
    p.text(x + 56, 146, "the last\ndirty pages", PAGES, "middle")
    p.box(x + 132, 84, 744 - x - 132, 92, "freeze when the\nforecast meets\n--max-frozen-ms,\nor 15 ms of pages", "#ffffff", PALE)
    return p


def commit():
    return sequence("The journals of both nodes: one entry at the source decides", [("source", 190), ("destination", 570)], [
        (0, "journal: started", PLAIN),
        (0, 1, "request", PAGES),
        (1, "journal: reserved", PLAIN),
        (0, 1, "layers, files, rounds of memory", PAGES),
        (0, "journal: frozen", PLAIN),
        (0, 1, "kernel state, the last pages", PAGES),
        (1, "journal: restored", PLAIN),
        (1, 0, "restored", PAGES),
        (0, "journal: committed", LIMIT),
        (0, 1, "committed", LIMIT),
        (1, "resume; journal: committed", RUNS),
        (1, 0, "runs", PAGES),
        (0, "journal: released, then done", PLAIN),
    ], (4, 9))


def connections():
    p = Picture("What becomes of a connection's data: dumped, held or sent again", 300)
    p.box(16, 16, 168, 268, "client", "#ffffff", PALE, top=True, bold=True)
    p.box(576, 16, 168, 268, "service's socket", "#ffffff", PALE, top=True, bold=True)
    rows = [
        ("received, not read", "in the dump; restored", None, RUNS),
        ("on the way to the service", "held, delivered at the resume", "right", PAGES),
        ("a SYN during the pause", "held; succeeds at once", "right", PAGES),
        ("sent, not acknowledged", "in the dump; sent again at the resume", "left", LIMIT),
        ("written, not sent", "in the dump; restored", None, RUNS),
    ]
    for number, (what, end, way, color) in enumerate(rows):
        y = 62 + number * 46
        if way:
            ends = [(186, y), (574, y)]
            p.line(ends if way == "right" else ends[::-1], color)
            p.text(380, y - 7, what, color, "middle")
            p.text(380, y + 17, end, PALE, "middle")
        else:
            p.box(586, y - 20, 148, 36, what, color)
            p.text(566, y + 3, end, PALE, "end")
    return p


def memory():
    p = Picture("Pages go from the source's processes over streams to the pager's store, and from there into the processes", 300)
    p.box(16, 12, 300, 276, "source", "#ffffff", PALE, top=True, bold=True)
    p.box(444, 12, 300, 276, "destination", "#ffffff", PALE, top=True, bold=True)
    p.box(36, 48, 110, 40, "tracker")
    p.box(186, 48, 110, 40, "reader")
    p.box(36, 228, 260, 44, "processes: running, then frozen", RUNS)
    p.line([(146, 68), (183, 68)], PAGES)
    p.text(166, 108, "which pages", PAGES, "middle")
    p.line([(91, 228), (91, 91)], PALE)
    p.line([(241, 228), (241, 91)], PALE)
    p.box(464, 48, 110, 40, "check, unpack")
    p.box(614, 48, 110, 40, "store (memfd)")
    p.line([(296, 68), (461, 68)], PAGES)
    p.text(380, 60, "batches, TLS", PAGES, "middle")
    p.line([(574, 68), (611, 68)], PAGES)
    p.box(464, 138, 260, 40, "godwit-pager")
    p.line([(669, 88), (669, 135)], PAGES)
    p.box(464, 228, 260, 44, "processes", RUNS)
    p.line([(640, 178), (640, 225)], PAGES)
    p.text(650, 206, "pages", PAGES)
    p.line([(530, 228), (530, 181)], LIMIT)
    p.text(520, 206, "page fault", LIMIT, "end")
    p.line([(464, 158), (268, 158), (268, 91)], LIMIT)
    p.text(380, 150, "fault stream", LIMIT, "middle")
    p.text(380, 176, "one page, now", LIMIT, "middle")
    return p


def dirty_pages():
    p = Picture("A page's life between two scans: protected and marked, written, listed as dirty, protected again", 212)
    p.box(24, 70, 180, 60, "protected, marked:\nclean", PLAIN, PALE)
    p.box(290, 70, 180, 60, "not protected, no mark:\ndirty", LIMIT)
    p.box(556, 70, 180, 60, "listed, to be sent", PAGES)
    p.line([(204, 100), (287, 100)], LIMIT)
    p.text(246, 90, "first write", LIMIT, "middle")
    p.text(246, 120, "by the\nservice", PALE, "middle")
    p.line([(470, 100), (553, 100)], PAGES)
    p.text(512, 90, "scan", PAGES, "middle")
    p.line([(646, 130), (646, 176), (114, 176), (114, 133)], PAGES)
    p.text(380, 168, "the same PAGEMAP_SCAN call protects and marks the page again", PAGES, "middle")
    p.box(290, 12, 446, 36, "history not certain: new or moved mapping, fork, exec", "#ffffff", LIMIT, dashed=True)
    p.line([(380, 48), (380, 67)], LIMIT, dashed=True)
    return p


def wire():
    p = Picture("A batch of up to 64 pages with runs of four kinds on a stream, and a fault stream beside it", 236)
    p.text(24, 30, "stream", bold=True)
    p.box(110, 12, 634, 92, "batch: up to 64 pages", "#ffffff", PAGES, top=True)
    for x, w, words, fill in ((122, 120, "run: data", PAGES), (246, 80, "run: zero", FROZEN), (330, 130, "run: retained", RUNS),
                              (464, 130, "run: deltas", PAGES), (608, 124, "checksum", PLAIN)):
        p.box(x, 44, w, 46, words, fill)
    p.text(24, 138, "stream", bold=True)
    p.box(110, 120, 634, 28, "batches of other pages: a page always uses the same stream", "#ffffff", PAGES)
    p.text(24, 190, "fault\nstream", bold=True)
    p.box(110, 172, 110, 40, "request", LIMIT)
    p.box(234, 172, 110, 40, "that page", PAGES)
    p.box(358, 172, 200, 40, "its unsent neighbours", "#ffffff", PAGES)
    p.text(570, 196, "not behind other pages", PALE)
    return p


def pager():
    p = Picture("The pager: the daemon writes checked pages into the store; the pager resolves page faults from it", 270)
    p.box(16, 16, 190, 96, "godwitd", "#ffffff", PALE, top=True, bold=True)
    p.box(32, 46, 158, 52, "checks and unpacks\nbatches", PLAIN)
    p.box(286, 16, 220, 238, "godwit-pager", "#ffffff", PALE, top=True, bold=True)
    p.box(306, 46, 180, 40, "store (memfd)", PAGES)
    p.box(306, 110, 180, 40, "index: which pages came", PLAIN)
    p.box(306, 174, 180, 60, "userfaultfd\nof each process", PLAIN)
    p.box(616, 16, 128, 238, "processes", RUNS)
    p.line([(206, 66), (303, 66)], PAGES)
    p.text(246, 58, "pages", PAGES, "middle")
    p.line([(486, 66), (613, 66)], PAGES)
    p.text(560, 58, "fills", PAGES, "middle")
    p.line([(616, 204), (489, 204)], LIMIT)
    p.text(560, 196, "page fault", LIMIT, "middle")
    p.line([(306, 204), (111, 204), (111, 115)], LIMIT)
    p.text(200, 196, "not in the store:", LIMIT, "middle")
    p.text(200, 222, "remote fault", LIMIT, "middle")
    p.text(20, 262, "The pager outlives the daemon.", PALE)
    return p


def overlay():
    p = Picture("The overlay: each node has a bridge with its services' ports, joined by VXLAN over the uplinks", 290)
    for x, name, service, address in ((16, "node a", "redis", "10.88.0.10"), (444, "node b", "api", "10.88.0.11")):
        p.box(x, 12, 300, 200, name, "#ffffff", PALE, top=True, bold=True)
        p.box(x + 130, 26, 150, 44, f"{service}: eth0\n{address}", RUNS)
        p.line([(x + 205, 70), (x + 205, 99)], FROZEN, head=False)
        p.text(x + 213, 89, "port gws…", PALE)
        p.box(x + 20, 100, 260, 32, "bridge gw0", PLAIN)
        p.box(x + 20, 162, 120, 32, "gwvx0", PAGES)
        p.box(x + 160, 162, 120, 32, "uplink", PLAIN)
        p.line([(x + 80, 132), (x + 80, 162)], FROZEN, head=False)
        p.line([(x + 220, 132), (x + 220, 162)], FROZEN, head=False)
    p.line([(156, 178), (176, 178)], PAGES, head=False)
    p.line([(584, 178), (604, 178)], PAGES, head=False)
    p.line([(236, 194), (236, 238), (664, 238), (664, 194)], PAGES, head=False)
    p.text(360, 230, "VXLAN, UDP 4789", PAGES, "middle")
    p.box(440, 252, 180, 30, "client", PLAIN)
    p.line([(530, 252), (530, 238)], FROZEN, head=False)
    return p


def cut_over():
    return sequence("The cut-over: frames of the frozen time are held at the destination and delivered after the commit",
                    [("client", 110), ("source", 380), ("destination", 650)], [
        (0, 1, "frames", RUNS),
        (2, "1  closed port, holds", PLAIN),
        (1, "2  one entry changes", LIMIT),
        (0, 1, "frames of the pause", PAGES),
        (1, 2, "forwarded: held", PAGES),
        (1, "dump; the port closes", PLAIN),
        (1, 2, "commit", LIMIT),
        (2, "4  port opens, delivers", PLAIN),
        (2, 0, "gratuitous ARP", PAGES),
        (2, "resume", RUNS),
        (2, 0, "unacknowledged data, again", RUNS),
        (0, 2, "frames", RUNS),
    ], (2, 8))


def published_ports():
    p = Picture("A client reaches a published port at any node; that node forwards to the service wherever it is", 216)
    p.box(16, 76, 120, 44, "client", PLAIN, bold=True)
    p.box(236, 16, 240, 164, "node a", "#ffffff", PALE, top=True, bold=True)
    p.box(252, 76, 208, 44, "port 8080: destination\nand source NAT", PAGES)
    p.box(556, 16, 188, 164, "node b", "#ffffff", PALE, top=True, bold=True)
    p.box(576, 76, 148, 44, "service, port 80", RUNS)
    p.line([(136, 90), (249, 90)], PAGES)
    p.line([(252, 108), (139, 108)], RUNS)
    p.line([(460, 90), (573, 90)], PAGES)
    p.line([(576, 108), (463, 108)], RUNS)
    p.text(518, 70, "VXLAN", PALE, "middle")
    p.text(16, 206, "The service moves; the connection stays with node a.", PALE)
    return p


def packet_filter():
    p = Picture("The packet filter accepts VXLAN packets from nodes of the cluster only", 236)
    p.box(346, 24, 188, 200, "inet godwit_guard", "#ffffff", LIMIT, top=True, bold=True)
    p.box(596, 46, 148, 48, "gwvx0, bridge gw0,\nservices", RUNS)
    rows = [("a node of the cluster", RUNS, "accepted"), ("the same, outside the tunnel,\nwhere nodes encrypt", LIMIT, "dropped, counted"),
            ("a service of any network", LIMIT, "dropped, counted"), ("any other host", LIMIT, "dropped, counted")]
    for number, (words, color, end) in enumerate(rows):
        y = 70 + number * 44
        p.box(16, y - 18, 230, 36, words, PLAIN)
        p.line([(246, y), (378, y)], color)
        p.text(388, y + 5, end, color)
    p.line([(450, 70), (593, 70)], RUNS)
    p.text(24, 34, "a packet to UDP 4789 from", PALE)
    return p


def encryption():
    p = Picture("A service's frame is put into VXLAN, encrypted for its node, and sent by UDP", 200)
    rows = [("frame of a service", ((470, 250, "Ethernet frame", RUNS),)),
            ("gwvx0", ((360, 106, "VXLAN", PAGES), (470, 250, "Ethernet frame", RUNS))),
            ("gwwg0 or gwtun0", ((230, 126, "UDP port 7119", PLAIN), (360, 360, "encrypted", LIMIT)))]
    for number, (name, parts) in enumerate(rows):
        y = 24 + number * 56
        p.text(24, y + 21, name, bold=True)
        for x, w, words, fill in parts:
            p.box(x, y, w, 34, words, fill)
        if number < 2:
            p.line([(90, y + 30), (90, y + 56)], PALE)
    p.text(24, 188, "Both add 60 bytes to a packet.", PALE)
    return p


def backends():
    p = Picture("Both backends join the ports of services to the kernel's VXLAN device", 262)
    for x, name, switch, how in ((16, "kernel", "bridge gw0", "bridge entries"), (396, "openvswitch", "switch gw0", "OpenFlow flows")):
        p.box(x, 12, 348, 238, f"--network-backend {name}", "#ffffff", PALE, top=True, bold=True)
        for side in (0, 1):
            p.box(x + 24 + side * 160, 44, 140, 30, "service", RUNS)
            p.line([(x + 94 + side * 160, 74), (x + 94 + side * 160, 126)], FROZEN, head=False)
        p.box(x + 24, 126, 300, 36, f"{switch}: {how}", PLAIN)
        p.box(x + 24, 206, 300, 32, "gwvx0: the kernel's VXLAN", PAGES)
        p.line([(x + 174, 162), (x + 174, 206)], FROZEN, head=False)
    p.text(118, 104, "gws…", PALE)
    p.text(498, 96, "gws…, gwt…\njoined by nftables", PALE)
    p.text(560, 188, "joined by nftables", PALE, "end")
    return p


def capture():
    p = Picture("The four places of a node at which packets are captured", 176)
    places = [("service", "eth0 in the\nservice"), ("port", "gws… of the\nbridge"), ("overlay", "gwvx0"), ("uplink", "the node's\nuplink")]
    for number, (name, where) in enumerate(places):
        x = 30 + number * 184
        p.box(x, 16, 148, 56, where, RUNS if number == 0 else PLAIN)
        if number < 3:
            p.line([(x + 148, 44), (x + 184, 44)], FROZEN, head=False)
        p.line([(x + 74, 72), (x + 74, 107)], PAGES)
        p.text(x + 66, 94, f"--at {name}", PAGES, "end")
    p.box(30, 110, 700, 46, "one pcapng file, an interface for each place of each node: NODE:INTERFACE", PLAIN, PAGES)
    return p


def isa():
    p = Picture("A program moves with an empty native stack: functions save their live values and return", 288)
    for x, name in ((16, "x86-64"), (574, "arm64")):
        p.box(x, 16, 170, 256, f"native stack, {name}", "#ffffff", PALE, top=True, bold=True)
    p.box(275, 16, 210, 256, "memory, the same on both", "#ffffff", RUNS, top=True)
    p.box(306, 232, 148, 28, "globals, heap, arrays", RUNS)
    for number, name in enumerate(("f: live values", "g: live values", "main: live values")):
        y = 60 + number * 54
        function = name.split(":")[0]
        p.box(31, y, 140, 36, function, FROZEN)
        p.box(306, y, 148, 36, name, PAGES)
        p.box(584, y, 150, 36, f"{function}, second version", PLAIN)
        p.line([(171, y + 18), (303, y + 18)], PAGES)
        p.line([(454, y + 18), (581, y + 18)], PAGES)
    p.text(231, 54, "save, return", PAGES, "middle")
    p.text(530, 54, "call, read", PAGES, "middle")
    return p


DRAWN = [lab, modes, pre_copy, commit, connections, memory, dirty_pages, wire, pager, overlay, cut_over, published_ports,
         packet_filter, encryption, backends, capture, isa]


def main():
    stale = []
    for draw in DRAWN:
        path = os.path.join(PLACE, draw.__name__.replace("_", "-") + ".svg")
        drawn = draw().svg()
        if "--check" not in sys.argv:
            with open(path, "w", encoding="utf-8") as file:
                file.write(drawn)
        elif not os.path.exists(path) or open(path, encoding="utf-8").read() != drawn:
            stale.append(os.path.relpath(path))
    if stale:
        sys.exit(f"Error: {', '.join(stale)} is not what site/pictures.py draws: run python3 site/pictures.py")


main()
