"""What runs in the Redis server, atomically, and the keys it works on. schemas/README.md describes the keys.

Scripts go with every call (EVAL): they are short, and so survive restarts of the server. All keys of a script have the
topic as their hash tag, and so are on one node of a cluster. Time is the server's.
"""

from streamtrain.errors import ConfigError


class StreamKeys:
    """The names of a topic's keys.

    Raises:
        ConfigError: the topic cannot be a hash tag.
    """

    def __init__(self, topic: str) -> None:
        if not topic or not topic.isprintable() or set("{}") & set(topic):
            raise ConfigError(f"a topic of Redis must be printable text without {{ and }}, not {topic!r}")
        self.topic = topic
        self._prefix = f"streamtrain:{{{topic}}}"
        self.partitions = f"{self._prefix}:partitions"
        self.identity = f"{self._prefix}:identity"

    def stream(self, partition: int) -> str:
        """Messages of a partition."""
        return f"{self._prefix}:stream:{partition}"

    def streams(self, count: int) -> list[str]:
        """Keys of the streams of all partitions."""
        return [self.stream(partition) for partition in range(count)]

    def writer(self, name: str) -> str:
        """The last batch of a writer."""
        return f"{self._prefix}:writer:{name}"

    def committed(self, group: str) -> str:
        """Positions that a group has committed."""
        return f"{self._prefix}:group:{group}:committed"

    def incarnation(self, group: str) -> str:
        """The latest incarnation of any member of a group."""
        return f"{self._prefix}:group:{group}:incarnation"

    def group(self, group: str) -> list[str]:
        """Leases, jobs, owners, changes, committed positions and latest incarnation, as scripts of groups take them."""
        names = ("leases", "jobs", "owners", "changes", "committed")
        return [*(f"{self._prefix}:group:{group}:{name}" for name in names), self.incarnation(group)]


_BOUNDS = """#!lua flags=no-writes
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local function bounds(key)
  if redis.call('EXISTS', key) == 0 then return 0, 0 end
  local info, low, last = redis.call('XINFO', 'STREAM', key), nil, nil
  for i = 1, #info, 2 do
    if info[i] == 'first-entry' then low = info[i + 1] end
    if info[i] == 'last-generated-id' then last = info[i + 1] end
  end
  local high = tonumber(string.match(last, '^0%-(%d+)$'))
  if not high then return -1, -1 end
  if not low then return high, high end
  return tonumber(string.match(low[1], '%d+$')) - 1, high
end
"""

# KEYS: partitions, streams. Answers low and high of each, flat; -1 where ids are not 0-n; nil if there is no topic.
BOUNDS = f"""{_BOUNDS}
local all = {{}}
for i = 2, #KEYS do
  all[#all + 1], all[#all + 2] = bounds(KEYS[i])
end
return all
"""

# KEYS: partitions, streams. ARGV: time in ms. Answers offsets; -1 of a stream whose entries have no time.
AT = f"""{_BOUNDS}
local function entry(key, offset)
  return redis.call('XRANGE', key, string.format('0-%.0f', offset + 1), '+', 'COUNT', 1)[1]
end
local function offset_of(entry) return tonumber(string.match(entry[1], '%d+$')) - 1 end
local function time_of(entry)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 't' then return tonumber(entry[2][i + 1]) end
  end
end
local function search(key)
  local low, high = bounds(key)
  while low < high do
    local middle = math.floor((low + high) / 2)
    local found = entry(key, middle)
    local time = found and time_of(found)
    if found and not time then return -1 end
    if not found or time >= tonumber(ARGV[1]) then high = middle else low = offset_of(found) + 1 end
  end
  local found = entry(key, low)
  return found and offset_of(found) or low
end
local all = {{}}
for i = 2, #KEYS do all[i - 1] = search(KEYS[i]) end
return all
"""

# KEYS: partitions, the writer's, streams. ARGV: number of the batch, ms that the writer is remembered, entries that a
# stream keeps, then of each message: index among the streams, number of further fields and values, the value, those.
WRITE = """#!lua
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
if tonumber(ARGV[1]) <= tonumber(redis.call('GET', KEYS[2]) or 0) then return 0 end
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local at, last = 4, #ARGV
while at <= last do
  local key, more = KEYS[ARGV[at] + 2], tonumber(ARGV[at + 1])
  if ARGV[3] == '0' then
    redis.call('XADD', key, '0-*', 'v', ARGV[at + 2], 't', now, unpack(ARGV, at + 3, at + 2 + more))
  else
    redis.call('XADD', key, 'MAXLEN', '~', ARGV[3], '0-*', 'v', ARGV[at + 2], 't', now,
      unpack(ARGV, at + 3, at + 2 + more))
  end
  at = at + 3 + more
end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return 1
"""

# KEYS: leases of a group. Answers how many have not run out.
MEMBERS = """#!lua flags=no-writes
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
return #redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf')
"""

# Scripts of groups. KEYS: see Keys.group. ARGV: the member, ms of its lease, then what each says below. They begin with
# removing members whose lease has run out, but not the caller: if none did before, nothing has happened. They run
# although the server's memory is full: readers must not lose their place because of writers.
_GROUP = """#!lua flags=allow-oom
local leases, jobs, owners, changes, committed, incarnation = unpack(KEYS)
local me = ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function changed() redis.call('XADD', changes, 'MAXLEN', '=', 1, '*', 'by', me) end
local function remove(member)
  redis.call('ZREM', leases, member)
  redis.call('HDEL', jobs, member)
  local owned = redis.call('HGETALL', owners)
  for i = 1, #owned, 2 do
    if owned[i + 1] == member then redis.call('HDEL', owners, owned[i]) end
  end
  changed()
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', string.format('(%.0f', now))) do
  if member ~= me then remove(member) end
end
local function renew() redis.call('ZADD', leases, string.format('%.0f', now + ARGV[2]), me) end
"""

# ARGV: job, what names of the same instance begin with or "", "replace" or "" if one that is there goes before the
# caller, and the member's incarnation or "". Answers the job of the members if it is another, 1 if another of the
# instance is there, else nil.
JOIN = f"""{_GROUP}
for _, job in ipairs(redis.call('HVALS', jobs)) do
  if job ~= ARGV[3] then return job end
end
for _, member in ipairs(ARGV[4] ~= '' and redis.call('HKEYS', jobs) or {{}}) do
  if member ~= me and string.sub(member, 1, #ARGV[4]) == ARGV[4] then
    if ARGV[5] ~= 'replace' then return 1 end
    remove(member)
  end
end
local function number(text) return tonumber(string.match(text, '^%d*')) or 0 end
local latest = redis.call('GET', incarnation) or ''
local ahead = number(ARGV[6]) - number(latest)
if ahead > 0 or ahead == 0 and ARGV[6] > latest then redis.call('SET', incarnation, ARGV[6]) end
redis.call('HSET', jobs, me, ARGV[3])
renew()
changed()
return false
"""

# Renews the lease. Answers id of the last change, members, and partitions with their owners, flat; nil to no member.
SYNC = f"""{_GROUP}
if not redis.call('ZSCORE', leases, me) then return false end
renew()
local last = redis.call('XREVRANGE', changes, '+', '-', 'COUNT', 1)[1]
return {{last and last[1] or '0-0', redis.call('ZRANGE', leases, 0, -1), redis.call('HGETALL', owners)}}
"""

# ARGV: partitions. Answers those that were free and are the member's now; none to no member.
TAKE = f"""{_GROUP}
local taken = {{}}
if not redis.call('ZSCORE', leases, me) then return taken end
for i = 3, #ARGV do
  if redis.call('HSETNX', owners, ARGV[i], me) == 1 then taken[#taken + 1] = tonumber(ARGV[i]) end
end
return taken
"""

# ARGV: partitions.
RELEASE = f"""{_GROUP}
for i = 3, #ARGV do
  if redis.call('HGET', owners, ARGV[i]) == me then redis.call('HDEL', owners, ARGV[i]) end
end
changed()
"""

# ARGV: partitions, each with its position. Positions of partitions that the member has no more are another's to note.
COMMIT = f"""{_GROUP}
for i = 3, #ARGV, 2 do
  if redis.call('HGET', owners, ARGV[i]) == me then redis.call('HSET', committed, ARGV[i], ARGV[i + 1]) end
end
"""

LEAVE = f"""{_GROUP}
remove(me)
"""
