-- Floating point in local variables.
local size, inside = 1000, 0
for py = 0, size - 1 do
  local ci = 2 * py / size - 1
  for px = 0, size - 1 do
    local cr = 2 * px / size - 1.5
    local zr, zi, rounds = 0, 0, 0
    while rounds < 50 and zr * zr + zi * zi < 4 do
      zr, zi = zr * zr - zi * zi + cr, 2 * zr * zi + ci
      rounds = rounds + 1
    end
    if rounds == 50 then inside = inside + 1 end
  end
end
print(inside)
