-- The string library: patterns, formats, packing; and utf8.
print(("hello world"):find("o w"), ("hello"):find("l+"), ("a.b"):find(".", 1, true), ("abc"):find("b", -1))
print(("key = value # note"):match("^(%w+)%s*=%s*(%w+)%s*(#?.*)$"))
print(("2024-02-29T12:34:56"):match("(%d+)-(%d+)-(%d+)T(%d+):(%d+):(%d+)"))
print(("THE (quick) fox"):find("%((%a+)%)"), ("f(a(b)c)d"):match("%b()"), ("  trim  "):match("^%s*(.-)%s*$") .. "|")
print(("hello world"):gsub("o", "0"), ("hello"):gsub("", "-"), ("abc"):gsub("%w", "%0%0"), ("abc def"):gsub("%f[%w]%w+", string.upper))
print(("$name is $age"):gsub("%$(%w+)", {name = "Lua", age = 30}), ("x1y2"):gsub("(%a)(%d)", "%2%1"), ("abc"):gsub(".", {a = 1, b = false}))
print(pcall(string.rep, "x", -1), ("ab"):rep(3, "-"), pcall(string.gsub, "x", "(", ""), pcall(string.gsub, "x", "x", "%2"))
for word, position in ("one two  three"):gmatch("(%a+)()") do io.write(word, "@", position, " ") end
print()
print(("x"):byte(), ("\u{7ff}"):byte(1, -1), string.char(72, 105), ("abc"):sub(-2), ("abc"):sub(2, 10), ("abc"):sub(0), #("abc"):sub(3, 2))
print(("MiXeD"):upper(), ("MiXeD"):lower(), ("abc"):reverse(), ("abc"):len(), #"a\0b", "a\z
       b\x41\65\u{48}\
c")

print(string.format("%d|%5d|%-5d|%05d|%+d|%x|%X|%#x|%o", 42, 42, 42, 42, 42, 255, 255, 255, 8))
print(string.format("%f|%.3f|%10.2f|%-10.1f|%e|%.0e|%g|%g|%g", 1.5, 2 / 3, math.pi, 1.25, 12345.678, 5e10, 1e20, 0.1, 100000))
print(string.format("%a|%.3a|%A", 1, 0.1, -255.5), string.format("%.17g %.99f", 0.1, 1 / 3))
print(string.format("%s|%10s|%-10s|%.2s|%q|%c%c|%i|%u", "str", "right", "left", "cut", 'a "quoted"\n\0\r line', 72, 105, 3.0, 7))
print(string.format("%q %q %q %q", 1 / 3, math.mininteger, 1 / 0, 255))
print(pcall(string.format, "%d", 1.5), pcall(string.format, "%y", 1), pcall(string.format, "%s"), string.format("%%"))
print(string.format("%s %s %s", nil, true, setmetatable({}, {__tostring = function() return "named" end})))
print(tostring(1e15), tostring(1e16), tostring(-0.0), tostring(1e100), 2^63, 1e15 + 0.5, 123456789012345678)
print(tonumber("  12  "), tonumber("0x1p-2"), tonumber("1e"), tonumber("ff", 16), tonumber("zz", 36), tonumber("8", 8), tonumber("1_000"), tonumber(""))

local packed = string.pack("<i1I2i4i8fdz s1 >I4 =j", -1, 65535, -2, 1 << 40, 0.5, -0.25, "zero", "len", 0xdeadbeef, 7)
print(#packed, (packed:gsub(".", function(c) return string.format("%02x", c:byte()) end)))
print(string.unpack("<i1I2i4i8fdz s1 >I4 =j", packed))
print(string.packsize("i4d!8i8"), pcall(string.pack, "i1", 200), pcall(string.unpack, "i4", "abc"), string.unpack("<i16", string.pack("<i16", -3)))

print(utf8.char(72, 228, 8364, 128512), utf8.len("häß€"), utf8.codepoint("€", 1), utf8.offset("aä€", 3), utf8.len("\xff"))
for p, c in utf8.codes("aä€😀") do io.write(p, ":", c, " ") end
print(#utf8.charpattern, pcall(utf8.codepoint, "\xff"))
for piece in ("aä€"):gmatch(utf8.charpattern) do io.write("[", piece, "]") end
print()

-- Long work: a dictionary of words, and a text that grows.
local words, seed = {}, 42
for n = 1, 1500 do
  seed = (seed * 1103515245 + 12345) % 2147483648
  local w = {}
  for k = 1, 3 + seed % 5 do w[k] = string.char(97 + (seed // (3 ^ k) // 1 | 0) % 26) end
  words[n] = table.concat(w)
end
local text = table.concat(words, " ")
local counts, distinct = {}, 0
for w in text:gmatch("%a+") do
  if not counts[w] then distinct = distinct + 1 end
  counts[w] = (counts[w] or 0) + 1
end
local replaced, times = text:gsub("a", "<%0>")
print(#text, distinct, times, #replaced, text:find("zz", 1, true), select(2, text:gsub("[aeiou]+[^aeiou ]*", "")))
