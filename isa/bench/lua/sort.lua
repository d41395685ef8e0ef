-- table.sort with and without a comparison in Lua.
local seed = 42
local function random() seed = (seed * 1103515245 + 12345) % 2147483648 return seed end
local sum = 0
for round = 1, 7 do
  local t = {}
  for i = 1, 150000 do t[i] = random() end
  table.sort(t)
  table.sort(t, function(a, b) return a > b end)
  sum = sum + t[1] + t[#t]
end
print(sum)
