-- The language: control flow, goto, integers and floats, integer division, bits, closures, varargs, multiple assignment,
-- constants, to-be-closed variables.
local function fib(n) if n < 2 then return n end return fib(n - 1) + fib(n - 2) end
print("fib", fib(16))

local out = {}
for i = 1, 5 do
  for j = 1, 5 do
    if (i + j) % 3 == 0 then goto continue end
    if j > i then goto done end
    out[#out + 1] = i * 10 + j
    ::continue::
  end
  ::done::
end
print("goto", table.concat(out, " "))
do
  local n = 0
  ::again::
  n = n + 1
  if n < 100 then goto again end
  print("again", n)
end

local i, total = 0, 0
repeat
  local square = i * i
  total = total + square
  i = i + 1
until square > 400
while true do
  i = i - 1
  if i == 3 then break end
end
print("loops", i, total)
for x = 10, 1, -3 do io.write(x, " ") end
for x = 1.0, 2, 0.25 do io.write(x, " ") end
for x = math.maxinteger - 1, math.maxinteger do io.write(x, " ") end
print()
print(pcall(function() for x = 1, 10, 0 do end end))

print(7 // 2, -7 // 2, 7 // -2, 7.5 // 2, -7.5 // 2, 7 % 3, -7 % 3, 7 % -3, -7.5 % 2, 5.3 % -2 < 0)
print(1 / 0, -1 / 0, 0 / 0 ~= 0 / 0, 2 ^ 10, 10 / 2, 3 | 5, 3 & 5, 3 ~ 5, ~0, 1 << 62, 1 << 64, -1 >> 60, 1 << -1)
print(math.maxinteger + 1 == math.mininteger, math.mininteger // -1, math.mininteger % -1, 5 // 0.0, -5 % math.huge)
print(1 == 1.0, math.type(1), math.type(1.0), math.type("1"), 2^53 == 2^53 + 1, 9007199254740993 < 9007199254740992.0)
print("10" + 5, "0x10" + 0, "1e1" * 1, 10 .. 20, "3" // 2, pcall(function() return "a" + 1 end))
print(0x7fffffffffffffff, 0xffffffffffffffff, 0x1p4, 1e308 * 10, 3 // 0.0, 0x.8p1, 1 // 1 | 0)
print(pcall(function() return 1 // 0 end), pcall(function() return 1.5 | 0 end))
print(1 < 2, "a" < "b", "a" < "B", "" < "a", not nil, not 0, nil == false, 1 and 2, nil and 1, false or "x", nil or false)

local function varargs(...)
  local a, b = ...
  local t = table.pack(...)
  return select("#", ...), a, b, t.n, (select(-1, ...))
end
print(varargs(1, nil, 3, nil))
print((varargs(1, 2)))
print(select("#", table.unpack({}, 1, 3)), pcall(select, 0))
local a, b, c = (function() return 1, 2, 3 end)()
a, b = b, a
print(a, b, c)
local t = {1, 2, [10] = 3, x = 4, (function() return 5, 6 end)()}
print(#t, t[3], t[4], t[10], t.x)

local function counter()
  local n = 0
  return function() n = n + 1 return n end, function() return n end
end
local up, get = counter()
for _ = 1, 50 do up() end
print("upvalues", get())
local fs = {}
for k = 1, 4 do fs[k] = function() k = k + 1 return k end end
print(fs[1](), fs[1](), fs[2](), fs[4]())

local log = {}
local function closing(name)
  return setmetatable({}, {__close = function(_, e) log[#log + 1] = name .. ":" .. tostring(e) end})
end
do
  local one <close> = closing("one")
  local two <close> = closing("two")
  local const <const> = 5
  log[#log + 1] = const
end
print(pcall(function()
  local x <close> = closing("x")
  error("oops", 0)
end))
local function early()
  for n = 1, 10 do
    local y <close> = closing("y" .. n)
    if n == 3 then return "returned" end
  end
end
print(early(), table.concat(log, " "))
print(load("local x <const> = 1; x = 2"))

-- Deep recursion, tail calls, and what is too deep.
local function depth(n) if n == 0 then return 0 end return 1 + depth(n - 1) end
local function tail(n) if n == 0 then return "end" end return tail(n - 1) end
print(depth(150), tail(20000))
print(select(2, pcall(function() local function f() return 1 + f() end return f() end)):match("stack overflow"))
