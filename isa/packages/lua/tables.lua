-- Tables: sort with all kinds of comparisons and of errors in them, insert, remove, move, concat, unpack, next,
-- metatables, inheritance, weak tables, garbage collection with finalisers.
local function shuffled(n, seed)
  local t = {}
  for i = 1, n do t[i] = i end
  for i = n, 2, -1 do
    seed = (seed * 16807) % 2147483647
    local j = seed % i + 1
    t[i], t[j] = t[j], t[i]
  end
  return t
end
local function is_sorted(t, before)
  for i = 2, #t do if before(t[i], t[i - 1]) then return false end end
  return true
end
local less, more = function(a, b) return a < b end, function(a, b) return a > b end
local t = shuffled(1200, 7)
table.sort(t)
print(is_sorted(t, less), t[1], t[#t])
local calls = 0
t = shuffled(1200, 8)
table.sort(t, function(a, b) calls = calls + 1 return a > b end)
print(is_sorted(t, more), calls)
local records = {}
for i, v in ipairs(shuffled(300, 9)) do records[i] = {key = v % 17, name = "n" .. v} end
table.sort(records, function(a, b)
  if a.key ~= b.key then return a.key < b.key end
  return a.name < b.name
end)
print(records[1].name, records[150].key, records[300].name)
-- Errors out of a comparison, at every depth of the sort.
for stop = 1, 2000, 333 do
  local n = 0
  print(stop, pcall(table.sort, shuffled(400, 3), function(a, b)
    n = n + 1
    if n == stop then error("stop at " .. n, 0) end
    return a < b
  end))
end
print(pcall(table.sort, {3, "x", 1}))
print(pcall(table.sort, shuffled(200, 5), function() return true end))
local sorter = coroutine.wrap(function() for _, n in ipairs({50, 100}) do local s = shuffled(n, n) table.sort(s, more) coroutine.yield(s[1]) end end)
print(sorter(), sorter())

local q = {}
for i = 1, 20 do table.insert(q, 1, i) end
table.insert(q, 5, "five")
print(table.remove(q), table.remove(q, 1), table.remove(q, 4), #q, table.concat(q, ",", 1, 6), pcall(table.insert, q, 100, 1))
print(table.concat(table.move({1, 2, 3, 4, 5}, 2, 5, 1), " "), table.concat(table.move({1, 2, 3}, 1, 3, 3), " "), table.unpack({1, 2, 3}, 2))
print(pcall(table.concat, {1, {}, 3}), next({}), rawlen({1, 2}), rawequal(q, q), rawget(setmetatable({}, {__index = less}), 1))
local total = 0
for k, v in pairs({10, 20, 30, x = 40, y = 50}) do total = total + v end
print(total, pcall(next, {}, "missing"), #table.pack(table.unpack({}, 1, 200)))

-- Metatables.
local Vector = {}
Vector.__index = Vector
Vector.__add = function(a, b) return Vector.new(a.x + b.x, a.y + b.y) end
Vector.__mul = function(a, b) return type(a) == "number" and Vector.new(a * b.x, a * b.y) or a.x * b.x + a.y * b.y end
Vector.__unm = function(a) return Vector.new(-a.x, -a.y) end
Vector.__eq = function(a, b) return a.x == b.x and a.y == b.y end
Vector.__lt = function(a, b) return a.x < b.x end
Vector.__le = function(a, b) return a.x <= b.x end
Vector.__tostring = function(a) return "(" .. a.x .. "," .. a.y .. ")" end
Vector.__len = function() return 2 end
Vector.__call = function(self, k) return self[k] end
Vector.__concat = function(a, b) return tostring(a) .. tostring(b) end
Vector.__idiv, Vector.__band, Vector.__shl = function() return "idiv" end, function() return "band" end, function() return "shl" end
Vector.__name = "Vector"
function Vector.new(x, y) return setmetatable({x = x, y = y}, Vector) end
local v, w = Vector.new(1, 2), Vector.new(3, 4)
print(tostring(v + w), v * w, tostring(2 * v), tostring(-v), v == Vector.new(1, 2), v ~= w, v < w, v >= w, #v, v("y"), v .. w, v // w, v & w, v << 1)
print(pcall(function() return v % w end))
local Animal = {} Animal.__index = Animal
function Animal.new(name) return setmetatable({name = name}, Animal) end
function Animal:speak() return self.name .. " makes a sound" end
local Dog = setmetatable({}, {__index = Animal}) Dog.__index = Dog
function Dog.new(name) return setmetatable(Animal.new(name), Dog) end
function Dog:speak() return Animal.speak(self) .. ": woof" end
print(Dog.new("Rex"):speak(), getmetatable("").__index == string, getmetatable(setmetatable({}, {__metatable = "locked"})))
print(pcall(setmetatable, setmetatable({}, {__metatable = 1}), {}))
local seen = {}
local proxy = setmetatable({}, {__index = function(_, k) seen[#seen + 1] = k return k .. "!" end, __newindex = function(s, k, x) rawset(s, k, x * 2) end,
  __pairs = function() return function(_, k) if not k then return 1, "paired" end end, nil, nil end})
proxy.a = 21
print(proxy.a, proxy.b, #seen, (function() for _, x in pairs(proxy) do return x end end)())

-- Weak tables and finalisers.
local weak, kept = setmetatable({}, {__mode = "k"}), {}
for i = 1, 200 do
  local key = {i}
  weak[key] = i
  if i % 10 == 0 then kept[#kept + 1] = key end
end
collectgarbage()
collectgarbage()
local left, sum = 0, 0
for _, i in pairs(weak) do left, sum = left + 1, sum + i end
print("weak", left, sum)
local finalised = 0
for i = 1, 100 do setmetatable({}, {__gc = function() finalised = finalised + 1 end}) end
collectgarbage()
print("finalised", finalised)
for _, mode in ipairs({"incremental", "generational", "incremental"}) do
  collectgarbage(mode)
  local junk
  for i = 1, 3000 do junk = {junk and #junk, tostring(i), {i}} end
  collectgarbage("step", 10)
  print(mode, type(collectgarbage("count")), collectgarbage("isrunning"))
end
