"""The Lua scripts that a Redis server runs for `RedisStore`. The module `redis` lists the keys that they use.

A script runs atomically, so no other client sees a half-updated index.
"""

from cuvee.codec.part_keys import PART_MARK
from cuvee.integrations.stores.base import PART_WEIGHTS

_ACCOUNT = """
local lru, sizes, sums, prefix, budget = KEYS[1], KEYS[2], KEYS[3], ARGV[1], tonumber(ARGV[2])
local share = tonumber(ARGV[3])
local weights = {WEIGHTS}

local function tenant_of(entry)
  return string.match(entry, '^[^/]+')
end

local function number_of(entry)
  return string.match(entry, '[0-9a-f]MARK$') and 1 or 0
end

local function of_number(order, number)
  return lru .. '.' .. number .. string.sub(order, #lru + 1)
end

-- An order of all entries or of a tenant's, with its refinements.
local function unlink(order)
  redis.call('UNLINK', order)
  for number = 1, #weights - 1 do redis.call('UNLINK', of_number(order, number)) end
end

local function wipe()
  for _, field in ipairs(redis.call('HKEYS', sums)) do
    if string.sub(field, 1, 3) == 'of:' then unlink(lru .. string.sub(field, 3)) end
  end
  unlink(lru)
  redis.call('UNLINK', sizes, sums)
  if share >= 0 then redis.call('HSET', sums, 'tenants', 1) end
end

-- A server that evicts on its own may have evicted a part of the index.
local entries = redis.call('HLEN', sizes)
if entries ~= redis.call('ZCARD', lru) or (entries > 0 and redis.call('EXISTS', sums) == 0) then
  wipe()
end
if share >= 0 and redis.call('HEXISTS', sums, 'tenants') == 0 then wipe() end
local apart = redis.call('HEXISTS', sums, 'tenants') == 1

local function add_to_tenant(tenant, bytes, count)
  redis.call('HINCRBY', sums, 'of:' .. tenant, bytes)
  if redis.call('HINCRBY', sums, 'in:' .. tenant, count) <= 0 then
    redis.call('HDEL', sums, 'of:' .. tenant, 'in:' .. tenant)
  end
end

local function use(order, clock, entry)
  local number = number_of(entry)
  redis.call('ZADD', order, clock, entry)
  if number > 0 then redis.call('ZADD', of_number(order, number), clock, entry) end
end

local function forget(order, entry)
  local number = number_of(entry)
  redis.call('ZREM', order, entry)
  if number > 0 then redis.call('ZREM', of_number(order, number), entry) end
end

local function drop(entry)
  local size = redis.call('HGET', sizes, entry)
  if apart then forget(lru .. ':' .. tenant_of(entry), entry) end
  if size then
    redis.call('HDEL', sizes, entry)
    forget(lru, entry)
    redis.call('HINCRBY', sums, 'bytes', -tonumber(size))
    if apart then add_to_tenant(tenant_of(entry), -tonumber(size), -1) end
  end
end

for i = 4, #ARGV do
  local entry, size = ARGV[i], 0
  local key = prefix .. entry
  if redis.call('TYPE', key).ok == 'string' then size = redis.call('STRLEN', key) end
  if size == 0 then
    drop(entry)
  else
    local known = tonumber(redis.call('HGET', sizes, entry) or 0)
    redis.call('HSET', sizes, entry, size)
    redis.call('HINCRBY', sums, 'bytes', size - known)
    local clock = redis.call('HINCRBY', sums, 'clock', 1)
    use(lru, clock, entry)
    if apart then
      use(lru .. ':' .. tenant_of(entry), clock, entry)
      add_to_tenant(tenant_of(entry), size - known, known == 0 and 1 or 0)
    end
  end
end

-- The largest age x weight is that of the oldest entry, or of the oldest refinement.
local refined
local function next_out(order)
  local oldest = redis.call('ZRANGE', order, 0, 0)[1]
  if refined == nil then refined = redis.call('EXISTS', of_number(lru, 1)) > 0 end
  if not refined then return oldest end
  local clock, out, most = redis.call('HGET', sums, 'clock'), nil, -1
  local function consider(entry)
    local score = redis.call('ZSCORE', order, entry)
    local weighted = score and (clock - score) * weights[number_of(entry) + 1]
    if score and weighted > most then out, most = entry, weighted end
    return score
  end
  consider(oldest)
  for number = 1, #weights - 1 do
    local part = of_number(order, number)
    local entry = redis.call('ZRANGE', part, 0, 0)[1]
    -- A store of an earlier version removes a refinement from the order of all entries only.
    while entry and not consider(entry) do
      redis.call('ZREM', part, entry)
      entry = redis.call('ZRANGE', part, 0, 0)[1]
    end
  end
  return out
end

local evicted = 0
if budget >= 0 then
  local page = redis.call('HSCAN', sizes, redis.call('HGET', sums, 'cursor') or '0', 'COUNT', 16)
  redis.call('HSET', sums, 'cursor', page[1])
  for i = 1, #page[2], 2 do
    if redis.call('EXISTS', prefix .. page[2][i]) == 0 then drop(page[2][i]) end
  end
  for i = 4, #ARGV do
    local tenant = tenant_of(ARGV[i])
    local order = lru .. ':' .. tenant
    if share >= 0 and redis.call('ZCARD', order) ~= tonumber(redis.call('HGET', sums, 'in:' .. tenant) or 0) then
      unlink(order)
      wipe()
    end
    while share >= 0 and tonumber(redis.call('HGET', sums, 'of:' .. tenant) or 0) > share do
      local out = next_out(order)
      evicted = evicted + redis.call('UNLINK', prefix .. out)
      drop(out)
    end
  end
  while tonumber(redis.call('HGET', sums, 'bytes') or 0) > budget do
    local out = next_out(lru)
    evicted = evicted + redis.call('UNLINK', prefix .. out)
    drop(out)
  end
end
return {evicted, tonumber(redis.call('HGET', sums, 'bytes') or 0), redis.call('HLEN', sizes),
        redis.call('HEXISTS', sums, 'counted')}
"""
ACCOUNT = _ACCOUNT.replace("WEIGHTS", ", ".join(map(str, PART_WEIGHTS))).replace("MARK", f"{PART_MARK}1")
"""Update the index for some entries, then evict entries until the budgets are met.

KEYS: lru, size and sums of a bucket. ARGV: the prefix of its entries; the budget in bytes (-1: neither sweep nor
evict); the budget of each tenant (-1: none); then the entries to check, whose tenants are kept within that budget.
Once any store has requested budgets for tenants, all stores keep the index by tenant.

Returns: entries evicted, bytes held, entries held, and whether the index is complete (0: it must be rebuilt).
"""

DISCARD = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'string' and redis.sha1hex(redis.call('GET', KEYS[1])) ~= ARGV[1] then return 0 end
if kind ~= 'string' and ARGV[1] ~= '' then return 0 end
return redis.call('UNLINK', KEYS[1])
"""
"""Delete a bad entry unless it was replaced.

KEYS: the entry. ARGV: the SHA-1 of the bad bytes, or '' for a value that is not a string.

Returns: how many keys were deleted.
"""
