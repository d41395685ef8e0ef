-- Hashing: keys that are strings, numbers and gone again.
local t, sum = {}, 0
for i = 1, 1500000 do t["key" .. i % 5000] = i t[i * 7] = i % 13 end
for k, v in pairs(t) do sum = sum + v if type(k) == "number" and k % 2 == 0 then t[k] = nil end end
for i = 1, 1500000 do sum = sum + (t[i * 7] or 1) + #(t["key" .. i % 100] .. "") end
print(sum)
