-- Work without end, for a journey that is asked for by time: prints a sum of many sorts and coroutines.
local rounds = tonumber(arg[1]) or 20
local sum, seed = 0, 1
local function random(n) seed = (seed * 16807) % 2147483647 return seed % n end
for round = 1, rounds do
  local t = {}
  for i = 1, 400 do t[i] = random(1000000) end
  local steps = 0
  local sorter = coroutine.wrap(function()
    table.sort(t, function(a, b) steps = steps + 1 return a > b end)
    for _, v in ipairs(t) do coroutine.yield(v) end
  end)
  for i = 1, 400 do sum = (sum * 31 + sorter() * i) % 1000000007 end
  sum = (sum + steps) % 1000000007
end
print(sum)
