-- Errors, load, require, io on files, os, math, debug. The working directory is the test's own.
local function level() error("from level", 2) end
print(pcall(function() level() end))
print(pcall(error), pcall(error, nil), pcall(error, {code = 1}) , select("#", pcall(error)))
print(xpcall(function() local t = nil; return t.x.y end, function(m) return "handler: " .. m end))
print(xpcall(function(...) return select("#", ...) end, print, 1, 2, 3))
print(pcall(pcall), pcall(xpcall), pcall(assert, false, "said"), pcall(assert, nil), assert(1, 2))
print(pcall(function() error(setmetatable({}, {__tostring = function() return "object" end})) end))
for _, code in ipairs({"return 1 +", "x = = 1", "goto nowhere", "break", "return '\\q'", "return 1 .. 2", "local function f() return f end return f() == f"}) do
  local f, message = load(code, "=code")
  print(code, f and f() or message)
end
print(type(load(function() return nil end)), load("return ...", "chunk", "t", {})(5), pcall(load, "x", "n", "b"))
local parts, n = {"return ", "1", " + ", "2"}, 0
print(load(function() n = n + 1 return parts[n] end)())
local env = {}
load("a = 1; b = a + 1; function c() return b end", "env", "t", env)()
print(env.a, env.b, env.c(), a)
local dumped = string.dump(function(x) local y = x * 2 return y + 1 end)
print(load(dumped, "dumped", "b")(20), load(dumped, "dumped", "t"))
package.preload.mine = function(name) return {name = name} end
print(require("mine").name, require("mine") == require("mine"), pcall(require, "no.such.module") == false)

local name = "file.txt"
local f <close> = assert(io.open(name, "w+"))
print(io.type(f), io.type(42), f:seek("cur"), f:write("line one\n", 2, " ", 3.5, "\nlast line without end") == f)
print(f:seek("set"), f:read("l", "n", "n", "l", "a"), f:read("a"), f:read("l"), f:read(0))
f:seek("set", 5)
print(f:read(3), f:seek("cur", -3), f:seek("end"), f:setvbuf("full", 64), f:flush() == f)
f:seek("set")
for l in f:lines("L") do io.write("[", l:gsub("\n", "\\n"), "]") end
print()
for i = 1, 300 do f:write(i, i % 10 == 0 and "\n" or " ") end
f:flush()
local count, sum = 0, 0
for a in io.lines(name, "n") do break end
for l in io.lines(name) do count = count + 1 for d in l:gmatch("%d+") do sum = sum + tonumber(d) end end
print(count, sum, f:seek("end"))
local g = io.open(name, "a")
g:write("appended\n")
print(g:close(), pcall(g.write, g, "x"), io.type(g), tostring(g))
local keep = io.output()
io.output(io.open("other.txt", "w"))
io.write("to the other\n")
io.close()
io.output(keep)
io.input("other.txt")
print(io.read("L"), io.read("l"), io.close(io.input()))
print(io.open("no/such/file"), pcall(io.lines, "missing"))
local temporary = io.tmpfile()
temporary:write(("x"):rep(5000))
temporary:seek("set", 4990)
print(#temporary:read("a"), temporary:close())
print(os.rename("other.txt", "renamed.txt"), os.remove("renamed.txt"), select(2, os.remove("renamed.txt")), io.open("renamed.txt") == nil)

print(os.time({year = 2024, month = 2, day = 29, hour = 12, min = 30, sec = 15, isdst = false}), os.date("!%Y-%m-%d %H:%M:%S %j %a", 86400 * 365))
local d = os.date("!*t", 1709210000)
print(d.year, d.month, d.day, d.hour, d.min, d.sec, d.wday, d.yday, d.isdst, os.difftime(10, 4), pcall(os.date, "%Ez", 0))
print(type(os.clock()), os.getenv("NO_SUCH_VARIABLE"), os.setlocale(nil), os.setlocale("xx"), type(os.tmpname()))

print(math.floor(-3.5), math.ceil(-3.5), math.fmod(-7, 3), math.fmod(7, -3.5), math.modf(-3.7), math.abs(math.mininteger), math.ult(1, -1))
print(math.sqrt(2), math.exp(1), math.log(10), math.log(8, 2), math.log(1000, 10), math.sin(1), math.cos(1), math.tan(1), math.asin(0.5), math.atan(1, -1))
print(math.tointeger(3.0), math.tointeger(3.5), math.tointeger("8"), math.max(1, 2.5, -1), math.min(3, 1, 2), math.pi, math.huge, pcall(math.max))
math.randomseed(42)
local r1 = {math.random(), math.random(10), math.random(-5, 5), math.random(0)}
math.randomseed(42)
local r2 = {math.random(), math.random(10), math.random(-5, 5), math.random(0)}
for i = 1, 4 do assert(r1[i] == r2[i]) end
print(r1[2], r1[3], pcall(math.random, 2, 1))

local function traced() return debug.traceback("trace", 1) end
print((traced():gsub("\n.*", "")), debug.getinfo(1, "l").currentline, debug.getinfo(print).what, debug.getinfo(traced, "S").linedefined)
local lines = {}
debug.sethook(function(_, line) lines[#lines + 1] = line end, "l")
local x = 1
x = x + 1
debug.sethook()
print(#lines, debug.gethook())
local up = 5
local function uses() return up end
print(debug.getupvalue(uses, 1), debug.setupvalue(uses, 1, 6), uses(), (debug.getlocal(1, 1)))
