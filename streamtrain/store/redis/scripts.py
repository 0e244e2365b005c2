"""What runs in the Redis server, atomically. schemas/README.md describes the keys.

Scripts go with every call (EVAL): they are short, and so survive restarts of the server. Each is given all of a model's
keys that scripts touch, see `script_keys`, then its own; they have the same hash tag. Time is the server's.
"""

from streamtrain.store.publication import PROD
from streamtrain.store.redis.layout import RedisKeys


def script_keys(keys: RedisKeys) -> list[str]:
    """The first KEYS of every script."""
    return [
        keys.head,
        keys.log,
        keys.steps,
        keys.applied,
        keys.writers,
        keys.numbers,
        keys.dictionaries,
        keys.building,
        keys.versions,
        keys.labels,
        keys.holds,
        keys.history,
        keys.lease,
        keys.traffic,
        keys.decided,
    ]


_NAMES = """
local head, log, steps, applied, writers, numbers, dictionaries, building, versions, labels, holds, history, owner,
  traffic, decided = unpack(KEYS)
"""
_HELPERS = f"""{_NAMES}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function is_whole(dictionary)
  local layout = redis.call('HGET', dictionaries, dictionary)
  return layout and string.sub(layout, 1, 1) ~= '-'
end
local function lease(dictionary, ms)
  redis.call('ZADD', building, string.format('%.0f', now + ms), dictionary)
end
local function forget(dictionary)
  if is_whole(dictionary) then
    redis.call('HSET', dictionaries, dictionary, '-' .. redis.call('HGET', dictionaries, dictionary))
  end
end
local function place_of(version)
  local manifest = redis.call('HGET', versions, version)
  return manifest and string.match(manifest, '^%d+')
end
local function metrics_of(version)
  local manifest = redis.call('HGET', versions, version)
  return cjson.encode(cjson.decode(string.match(manifest, '{{.*')).publication.metrics)
end
local function metrics_labelled(label, version)
  if version ~= '' then return metrics_of(version) end
  local publication = label == '{PROD}' and redis.call('HGET', head, 'publication')
  return publication and cjson.encode(cjson.decode(publication).metrics) or '{{}}'
end
local function decide()
  local before = redis.call('GET', decided) or ''
  local at = string.format('%.0f', math.max(now, 1 + (string.match(before, '^%d+') or 0)))
  redis.call('SET', decided, string.sub(at .. ' ' .. before, 1, 1400))
end
local function note(what, who, why, version, label, was, metrics, ...)
  redis.call('XADD', history, 'MAXLEN', '~', 10000, '*', 'what', what, 'who', who, 'why', why, 'version', version,
    'label', label, 'was', was, 'metrics', metrics, ...)
end
"""
_READ = f"#!lua flags=no-writes\n{_NAMES}"
_LOOK = f"#!lua flags=no-writes\n{_HELPERS}"
_WRITE = f"#!lua\n{_HELPERS}"
_SMALL = f"#!lua flags=allow-oom\n{_HELPERS}"  # small writes, and such that free memory, though memory is full

# Answers the head, flat; nothing if there is none.
STATE = f"""{_READ}
return redis.call('HGETALL', head)
"""

# Answers the name of a key that has lost what the head needs; "" if there is none, or no head.
LOST = f"""{_LOOK}
local of = redis.call('HMGET', head, 'id', 'before', 'dictionary', 'layout')
if redis.call('EXISTS', head) == 0 then return '' end
if not (of[1] and of[2] and of[3] and of[4]) then return 'head' end
if not is_whole(of[3]) then return 'dictionaries' end
local kept = redis.call('ZRANGE', steps, -2, -1)
local function is_at(step, id) return step and string.match(step, '(.*):') == id end
if not is_at(kept[#kept], of[1]) or of[2] ~= '0-0' and not is_at(kept[1], of[2]) then return 'steps' end
if #redis.call('XRANGE', log, of[1], of[1]) == 0 then return 'log' end
if redis.call('HLEN', applied) < cjson.decode(of[4]).shards then return 'applied' end
if redis.call('HEXISTS', numbers, 'bytes') == 0 then return 'numbers' end
return ''
"""

# ARGV: id of the head, nodes of Redis that have all of it.
VOUCH = f"""{_SMALL}
if redis.call('HGET', head, 'id') == ARGV[1] then redis.call('HSET', head, 'nodes', ARGV[2]) end
"""

# ARGV: layout, ms of the lease. Answers the number of a new dictionary: never one that there was before, even if the
# server has forgotten everything since.
BEGIN = f"""{_WRITE}
local number = string.format('%.0f', math.max(now, 1 + (redis.call('HGET', numbers, 'dictionary') or 0)))
redis.call('HSET', numbers, 'dictionary', number)
redis.call('HSET', dictionaries, number, ARGV[1])
lease(number, ARGV[2])
return number
"""

# ARGV: dictionary, ms of the lease. Answers whether the dictionary is still there.
RENEW = f"""{_SMALL}
if not is_whole(ARGV[1]) then return 0 end
lease(ARGV[1], ARGV[2])
return 1
"""

# Answers the lease, flat, and whether it is in force; nothing if there has never been one.
LEASE = f"""{_LOOK}
local held = redis.call('HGETALL', owner)
if #held == 0 then return held end
held[#held + 1] = 'live'
held[#held + 1] = now < tonumber(redis.call('HGET', owner, 'until') or 0) and '1' or '0'
return held
"""

# ARGV: generation that the cluster has had, or "0", its run, caller, host, ms of the lease. Answers the generation
# that it has now; "" if another cluster has the lease.
#
# A generation is the server's time in ms when it began, but never less than one that there was. A cluster that has had
# the last one continues with it. One without any takes the lease over from another of the same run, as that is what it
# was started for; of another run only if it has run out.
HOLD_LEASE = f"""{_SMALL}
local held = redis.call('HMGET', owner, 'generation', 'run', 'holder', 'until')
local last, mine = tonumber(held[1] or 0), tonumber(ARGV[1])
local live = now < tonumber(held[4] or 0) and held[3] ~= ARGV[3]
if mine < last or mine == 0 then
  if mine > 0 and held[2] == ARGV[2] then return '' end
  if live and held[2] ~= ARGV[2] then return '' end
  mine = math.max(now, last + 1)
end
local generation = string.format('%.0f', mine)
if mine ~= last then redis.call('HSET', owner, 'since', string.format('%.0f', now)) end
redis.call('HSET', owner, 'generation', generation, 'run', ARGV[2], 'holder', ARGV[3], 'host', ARGV[4],
  'until', string.format('%.0f', now + ARGV[5]))
return generation
"""

# ARGV: the holder, which releases the lease.
END_LEASE = f"""{_SMALL}
if redis.call('HGET', owner, 'holder') == ARGV[1] then redis.call('HSET', owner, 'until', 0) end
"""

# ARGV: shard, owner, the only one that applies from now on. Answers the id up to which the shard has applied, if any.
OWN = f"""{_SMALL}
redis.call('HSET', writers, ARGV[1], ARGV[2])
return redis.call('HGET', applied, ARGV[1])
"""

# ARGV: shard, owner, dictionary, id up to which the shard has applied, or "" to ask only. Answers whether it may.
APPLIED = f"""{_SMALL}
if redis.call('HGET', writers, ARGV[1]) ~= ARGV[2] then return 0 end
if redis.call('HGET', head, 'dictionary') ~= ARGV[3] then return 0 end
if ARGV[4] ~= '' then redis.call('HSET', applied, ARGV[1], ARGV[4]) end
return 1
"""

# ARGV: number, dictionary, publication, layout, tokens, "1" if it is a full one, bytes in the log, bytes that the log
# keeps, shards, generation of the lease, or "0", nodes of Redis. Answers what became of it, and the head's number.
#
# The log begins with the entry of a commit: the oldest within the limit, but never a later one than the last but one.
# Another number of shards goes on from a head that those which wrote it have applied, as if they had applied it.
# A full publication needs nothing of what was there before: whatever is lost, it begins after the last commit in the
# log, or at its beginning.
COMMIT = f"""{_WRITE}
local function last_commit()
  local after = '+'
  while true do
    local found = redis.call('XREVRANGE', log, after, '-', 'COUNT', 8)
    if #found == 0 then return nil end
    for _, entry in ipairs(found) do
      if entry[2][1] == 'c' then return entry end
      after = '(' .. entry[1]
    end
  end
end
local was = redis.call('HMGET', head, 'number', 'tokens', 'dictionary', 'id', 'layout')
local number, is_full = was[1], ARGV[6] == '1'
local generation = redis.call('HGET', owner, 'generation')
if ARGV[10] ~= '0' and generation and generation ~= ARGV[10] then return {{'lease', number or '0'}} end
if number == ARGV[1] and was[2] == ARGV[5] then return {{'committed', number}} end
local ahead = tonumber(ARGV[1]) - (number or 0)
if number and (ahead < 1 or ahead > 1 and not is_full) then return {{'turn', number}} end
if is_full and not is_whole(ARGV[2]) or not is_full and was[3] ~= ARGV[2] then return {{'gone', number or '0'}} end
local others = false
if not is_full then
  local shards = cjson.decode(was[5]).shards
  others = shards ~= tonumber(ARGV[9])
  if others and redis.call('HLEN', applied) ~= shards then return {{'behind', shards}} end
  local all = redis.call('HGETALL', applied)
  for i = 1, #all, 2 do
    if all[i + 1] ~= was[4] then return {{'behind', all[i]}} end
  end
end
local total = redis.call('HINCRBY', numbers, 'bytes', ARGV[7])
local before_it = was[4]
if is_full then
  redis.call('DEL', steps)
  local last = last_commit()
  before_it = last and last[1]
  if last then
    local is_read, of = pcall(cjson.decode, last[2][2])
    local its = string.format('%.0f', is_read and type(of) == 'table' and tonumber(of.number) or ARGV[1] - 1)
    redis.call('ZADD', steps, its, before_it .. ':' .. string.format('%.0f', total - ARGV[7]))
    local is_laid, layout = pcall(cjson.decode, last[2][4])
    local old = is_laid and type(layout) == 'table' and string.format('%.0f', tonumber(layout.dictionary) or 0)
    if old and not was[3] and redis.call('HEXISTS', dictionaries, old) == 0 then
      redis.call('HSET', dictionaries, old, last[2][4])  -- so that it is deleted
    end
  end
end
local id = redis.call('XADD', log, '*', 'c', ARGV[3], 'l', ARGV[4], 'a', ARGV[5], 'f', ARGV[6])
redis.call('HSET', head, 'number', ARGV[1], 'id', id, 'before', before_it or '0-0', 'dictionary', ARGV[2],
  'publication', ARGV[3], 'layout', ARGV[4], 'tokens', ARGV[5], 'nodes', ARGV[11])
redis.call('ZADD', steps, ARGV[1], id .. ':' .. string.format('%.0f', total))
if is_full then
  redis.call('DEL', applied)
  for shard = 0, ARGV[9] - 1 do redis.call('HSET', applied, shard, id) end
  redis.call('ZREM', building, ARGV[2])
  if was[3] then forget(was[3]) end
end
if others then
  redis.call('DEL', applied, writers)
  for shard = 0, ARGV[9] - 1 do redis.call('HSET', applied, shard, was[4]) end
end
local function oldest() return string.match(redis.call('ZRANGE', steps, 0, 0)[1], '(.*):(%d+)') end
local first, before = oldest()
while redis.call('ZCARD', steps) > 2 and total - before > tonumber(ARGV[8]) do
  redis.call('ZREMRANGEBYRANK', steps, 0, 0)
  first, before = oldest()
end
if redis.call('ZCARD', steps) > 1 then redis.call('XTRIM', log, 'MINID', '=', first) end
return {{'committed', ARGV[1]}}
"""

# Has the log begin with the last commit but one, so that it has the changes of the last one only.
TRIM = f"""{_SMALL}
redis.call('ZREMRANGEBYRANK', steps, 0, -3)
local kept = redis.call('ZRANGE', steps, 0, 0)
if redis.call('ZCARD', steps) > 1 then redis.call('XTRIM', log, 'MINID', '=', string.match(kept[1], '(.*):')) end
"""

# KEYS: further weights and sums of the dictionary. ARGV: dictionary, version, manifest, who, why. Answers whether the
# version is there now.
ADD_VERSION = f"""{_WRITE}
if not is_whole(ARGV[1]) or redis.call('EXISTS', KEYS[16], KEYS[17]) < 2 then return 0 end
redis.call('HSET', versions, ARGV[2], ARGV[1] .. ' ' .. ARGV[3])
redis.call('ZREM', building, ARGV[1])
note('version', ARGV[4], ARGV[5], ARGV[2], '', '', metrics_of(ARGV[2]))
return 1
"""

# KEYS: further what the label was before, "" where it was none. ARGV: label, version or "" for none, who, why, and
# maybe what must have the label now. Answers whether there is such a version; 2: something else has the label.
LABEL = f"""{_SMALL}
local label, version = ARGV[1], ARGV[2]
local was = redis.call('HGET', labels, label) or ''
if ARGV[5] and ARGV[5] ~= was then return 2 end
if version ~= '' and redis.call('HEXISTS', versions, version) == 0 then return 0 end
if was ~= version then
  redis.call('LPUSH', KEYS[16], was)
  redis.call('LTRIM', KEYS[16], 0, 99)
end
if version == '' then redis.call('HDEL', labels, label) else redis.call('HSET', labels, label, version) end
decide()
note('label', ARGV[3], ARGV[4], version, label, was, metrics_labelled(label, version))
return 1
"""

# KEYS: further what the label was before. ARGV: label, who, why, and maybe what must have the label now. Answers the
# version that the label is again, "" if it is none again; nothing if there was nothing before that is still there; 2 as
# a number if something else has the label.
ROLLBACK = f"""{_SMALL}
local label = ARGV[1]
local was = redis.call('HGET', labels, label) or ''
if ARGV[4] and ARGV[4] ~= was then return 2 end
local function is_there(version)
  if version == '' then return redis.call('EXISTS', head) == 1 end
  return redis.call('HEXISTS', versions, version) == 1
end
local version = redis.call('LPOP', KEYS[16])
while version and (version == was or not is_there(version)) do version = redis.call('LPOP', KEYS[16]) end
if not version then return false end
if version == '' then redis.call('HDEL', labels, label) else redis.call('HSET', labels, label, version) end
decide()
note('rollback', ARGV[2], ARGV[3], version, label, was, metrics_labelled(label, version))
return version
"""

# ARGV: the traffic that must be now, as it was read, what it becomes, who, why, and both as the history shows them.
# Answers whether it was that.
TRAFFIC = f"""{_SMALL}
if (redis.call('GET', traffic) or '') ~= ARGV[1] then return 0 end
if ARGV[2] == '' then redis.call('DEL', traffic) else redis.call('SET', traffic, ARGV[2]) end
decide()
note('traffic', ARGV[3], ARGV[4], '', '', '', '{{}}', 'traffic', ARGV[6], 'traffic_was', ARGV[5])
return 1
"""

# Answers when labels or traffic were decided, in ms, the latest first, or "", the traffic, or "", and the labels, flat.
DECIDED = f"""{_READ}
return {{redis.call('GET', decided) or '', redis.call('GET', traffic) or '', redis.call('HGETALL', labels)}}
"""

# ARGV: what DECIDED answers first now that it is lost, what it answered before, the traffic, or "", who, why, and
# labels with their versions. Answers whether it is decided so again: not if something has been decided since.
RESTORE = f"""{_SMALL}
if (redis.call('GET', decided) or '') ~= ARGV[1] then return 0 end
redis.call('SET', decided, ARGV[2])
redis.call('DEL', labels)
for i = 6, #ARGV, 2 do
  redis.call('HSET', labels, ARGV[i], ARGV[i + 1])
  note('label', ARGV[4], ARGV[5], ARGV[i + 1], ARGV[i], '', '{{}}')
end
if ARGV[3] == '' then redis.call('DEL', traffic) else redis.call('SET', traffic, ARGV[3]) end
return 1
"""

# ARGV: who, why, a setting as it is now, and as it was.
SETTING = f"""{_SMALL}
note('setting', ARGV[1], ARGV[2], '', '', '', '{{}}', 'setting', ARGV[3], 'setting_was', ARGV[4])
return 1
"""

# ARGV: version, or 0 for the head, server, ms. Answers whether there is such a version.
HOLD = f"""{_SMALL}
if ARGV[1] ~= '0' and redis.call('HEXISTS', versions, ARGV[1]) == 0 then return 0 end
redis.call('ZADD', holds, string.format('%.0f', now + ARGV[3]), ARGV[1] .. ':' .. ARGV[2])
return 1
"""

# Answers "{version}:{server}" of every hold that has not run out.
HOLDERS = f"""{_LOOK}
return redis.call('ZRANGE', holds, string.format('%.0f', now), '+inf', 'BYSCORE')
"""

# ARGV: version, who, why. Answers the names of its users; if there are any, nothing has happened.
DELETE = f"""{_SMALL}
local version, users = ARGV[1], {{}}
local all = redis.call('HGETALL', labels)
for i = 1, #all, 2 do
  if all[i + 1] == version then users[#users + 1] = 'the label ' .. all[i] end
end
redis.call('ZREMRANGEBYSCORE', holds, '-inf', string.format('(%.0f', now))
for _, hold in ipairs(redis.call('ZRANGE', holds, 0, -1)) do
  local of, server = string.match(hold, '^(%d+):(.*)$')
  if of == version then users[#users + 1] = 'the server ' .. server end
end
local place = place_of(version)
if #users > 0 or not place then return users end
note('delete', ARGV[2], ARGV[3], version, '', '', metrics_of(version))
redis.call('HDEL', versions, version)
forget(place)
return users
"""

# Answers dictionaries that will not be used any more, each with its layout, flat. Those in use are in the list of
# dictionaries afterwards, also if that was lost, so that their rows can be deleted one day.
GARBAGE = f"""{_SMALL}
local used = {{}}
local function use(dictionary, layout)
  used[dictionary] = true
  if redis.call('HEXISTS', dictionaries, dictionary) == 0 then
    redis.call('HSET', dictionaries, dictionary, layout())
  end
end
local current = redis.call('HGET', head, 'dictionary')
if current then use(current, function() return redis.call('HGET', head, 'layout') end) end
for _, version in ipairs(redis.call('HKEYS', versions)) do
  use(place_of(version), function()
    return cjson.encode(cjson.decode(string.match(redis.call('HGET', versions, version), '{{.*')).layout)
  end)
end
redis.call('ZREMRANGEBYSCORE', building, '-inf', string.format('(%.0f', now))
for _, dictionary in ipairs(redis.call('ZRANGE', building, 0, -1)) do used[dictionary] = true end
local found = {{}}
for _, dictionary in ipairs(redis.call('HKEYS', dictionaries)) do
  if not used[dictionary] then
    forget(dictionary)
    found[#found + 1] = dictionary
    found[#found + 1] = string.sub(redis.call('HGET', dictionaries, dictionary), 2)
  end
end
return found
"""
