-- Allocation and the garbage collector.
local function make(depth)
  if depth == 0 then return {} end
  return {make(depth - 1), make(depth - 1)}
end
local function count(tree) if tree[1] then return 1 + count(tree[1]) + count(tree[2]) end return 1 end
local sum = 0
for round = 1, 120 do sum = sum + count(make(14)) end
print(sum)
