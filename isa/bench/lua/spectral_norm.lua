-- Floating point in arrays, and a function call in the innermost loop.
local n = 700
local function a(i, k) local ik = i + k - 1 return 1 / (ik * (ik - 1) / 2 + i) end
local function av(x, y) for i = 1, n do local s = 0 for k = 1, n do s = s + x[k] * a(i, k) end y[i] = s end end
local function atv(x, y) for i = 1, n do local s = 0 for k = 1, n do s = s + x[k] * a(k, i) end y[i] = s end end
local u, v, t = {}, {}, {}
for i = 1, n do u[i] = 1 end
for _ = 1, 10 do av(u, t) atv(t, v) av(v, t) atv(t, u) end
local uv, vv = 0, 0
for i = 1, n do uv = uv + u[i] * v[i] vv = vv + v[i] * v[i] end
print(string.format("%.9f", math.sqrt(uv / vv)))
