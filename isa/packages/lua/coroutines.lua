-- Coroutines: generators, symmetric passing, errors inside, wrap, close, yields across pcall, metamethods, iterators and
-- sort, and many at a time.
local function generate(n)
  return coroutine.wrap(function() for i = 1, n do coroutine.yield(i, i * i) end return "last" end)
end
local sum = 0
for i, square in generate(200) do
  if i == "last" then break end
  sum = sum + square
end
print("sum", sum)

local co = coroutine.create(function(a, b)
  print("start", a, b, coroutine.isyieldable())
  local c = coroutine.yield(a + b)
  print("got", c)
  local d, e = coroutine.yield(c * 2)
  print("got", d, e)
  return "done", d + e
end)
print(coroutine.status(co), coroutine.resume(co, 1, 2))
print(coroutine.status(co), coroutine.resume(co, 10))
print(coroutine.resume(co, 3, 4))
print(coroutine.status(co), coroutine.resume(co))
print(coroutine.isyieldable(), type(coroutine.running()), select(2, coroutine.running()))

-- Permutations, recursively.
local function permute(a, n)
  n = n or #a
  if n <= 1 then coroutine.yield(a) return end
  for i = 1, n do
    a[n], a[i] = a[i], a[n]
    permute(a, n - 1)
    a[n], a[i] = a[i], a[n]
  end
end
local count, last = 0, nil
for p in coroutine.wrap(function() permute({1, 2, 3, 4, 5}) end) do
  count, last = count + 1, table.concat(p, ",")
end
print("permutations", count, last)

-- A yield across pcall, xpcall, a metamethod, an iterator, and a comparison that sort may not yield over.
local function across()
  local ok, value = pcall(function()
    local got = coroutine.yield("in pcall")
    error({got = got})
  end)
  coroutine.yield(ok, value.got)
  print(xpcall(function() return coroutine.yield("in xpcall") .. nil end, function(m) return "handled: " .. m:gsub("^.-:%d+: ", "") end))
  local meta = setmetatable({}, {
    __index = function(_, k) return coroutine.yield("index " .. k) end,
    __add = function(x, y) return coroutine.yield("add") end,
    __call = function(_, ...) return coroutine.yield("call", ...) end,
    __concat = function() return coroutine.yield("concat") end,
    __lt = function() return coroutine.yield("lt") end,
    __len = function() return coroutine.yield("len") end,
    __eq = function() return coroutine.yield("eq") end,
  })
  print(meta.key, meta + 1, meta(1, 2), meta .. "x", meta < meta, #meta, meta == setmetatable({}, getmetatable(meta)))
  for x in function(_, c) return coroutine.yield("iterate", c) end, nil, nil do print("iterated", x) end
  print(pcall(table.sort, {3, 2, 1}, function(x, y) coroutine.yield() return x < y end))
  return "end"
end
local co2 = coroutine.wrap(across)
local reply
for n = 1, 100 do
  local got = table.pack(co2(reply))
  for i = 1, got.n do got[i] = tostring(got[i]) end
  print(n, table.concat(got, " "))
  if got[1] == "end" then break end
  reply = (n < 14) and ("r" .. n) or nil
end

-- Errors, and what is left.
local bad = coroutine.create(function() local x = nil; coroutine.yield(1); return x.field end)
print(coroutine.resume(bad))
print(coroutine.resume(bad))
print(coroutine.resume(bad))
print(pcall(coroutine.wrap(function() error("inside", 0) end)))
print(coroutine.resume(coroutine.running()))
print(pcall(coroutine.yield))
local closed = coroutine.create(function()
  local v <close> = setmetatable({}, {__close = function() print("closed") end})
  coroutine.yield("suspended")
end)
print(coroutine.resume(closed))
print(coroutine.close(closed), coroutine.status(closed))
print(debug.traceback(coroutine.create(function() end)))

-- Many that take turns.
local tasks, log = {}, {}
for id = 1, 30 do
  tasks[id] = coroutine.create(function()
    for step = 1, 10 do
      log[#log + 1] = id * step
      coroutine.yield(step)
    end
    return nil
  end)
end
local alive, rounds = #tasks, 0
while alive > 0 do
  rounds = rounds + 1
  for id, task in ipairs(tasks) do
    if coroutine.status(task) ~= "dead" and select(2, coroutine.resume(task)) == nil then alive = alive - 1 end
  end
end
local checksum = 0
for n, v in ipairs(log) do checksum = (checksum * 31 + v * n) % 1000000007 end
print("tasks", rounds, #log, checksum)

-- Coroutines in coroutines, a chain of filters.
local function source(n) return coroutine.wrap(function() for x = 2, n do coroutine.yield(x) end end) end
local function filter(p, g)
  return coroutine.wrap(function() for n in g do if n % p ~= 0 then coroutine.yield(n) end end end)
end
local primes, chain = {}, source(120)
while true do
  local n = chain()
  if not n then break end
  primes[#primes + 1] = n
  chain = filter(n, chain)
end
print("sieve", #primes, table.concat(primes, " "))
