-- Floating point in fields of tables.
local bodies = {
  {x = 0, y = 0, z = 0, vx = 0, vy = 0, vz = 0, mass = 39.47841760435743},
  {x = 4.84143144246472090, y = -1.16032004402742839, z = -0.103622044471123109, vx = 0.606326392995832, vy = 2.81198684491626, vz = -0.02521836165988763, mass = 0.037693674870389493},
  {x = 8.34336671824457987, y = 4.12479856412430479, z = -0.403523417114321381, vx = -1.01077434617879236, vy = 1.82566237123041186, vz = 0.00841576137658415, mass = 0.011286326131968767},
  {x = 12.8943695621391310, y = -15.1111514016986312, z = -0.223307578892655734, vx = 1.08279100644153536, vy = 0.868713018169608, vz = -0.0108326374013636, mass = 0.0017237240570597112},
}
local function advance(dt)
  local n = #bodies
  for i = 1, n do
    local a = bodies[i]
    for k = i + 1, n do
      local b = bodies[k]
      local dx, dy, dz = a.x - b.x, a.y - b.y, a.z - b.z
      local d2 = dx * dx + dy * dy + dz * dz
      local mag = dt / (d2 * math.sqrt(d2))
      local am, bm = a.mass * mag, b.mass * mag
      a.vx = a.vx - dx * bm a.vy = a.vy - dy * bm a.vz = a.vz - dz * bm
      b.vx = b.vx + dx * am b.vy = b.vy + dy * am b.vz = b.vz + dz * am
    end
  end
  for i = 1, n do
    local a = bodies[i]
    a.x = a.x + dt * a.vx a.y = a.y + dt * a.vy a.z = a.z + dt * a.vz
  end
end
for _ = 1, 700000 do advance(0.01) end
print(string.format("%.9f %.9f", bodies[1].x, bodies[4].y))
