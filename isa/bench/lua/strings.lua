-- Building, searching and formatting strings.
local parts = {}
for i = 1, 400000 do parts[#parts + 1] = string.format("%d:%s;%5.2f", i, ("x"):rep(i % 7), i / 3) end
local text = table.concat(parts, "\n")
local words, digits = 0, 0
for word in text:gmatch("%w+") do words = words + 1 end
for digit in text:gmatch("%d") do digits = digits + 1 end
local changed, count = text:gsub("x+", function(s) return s:upper() end)
print(#text, words, digits, count, #changed, text:find("149999", 1, true))
