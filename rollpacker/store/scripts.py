"""The scripts that change the durable state of a run. All compare the fence first.

KEYS[1] is the state hash, ARGV[1] the fence of the writer.
"""

from __future__ import annotations

_CHECK_FENCE = """
local fence = tonumber(redis.call('HGET', KEYS[1], 'fence') or '0')
if fence > tonumber(ARGV[1]) then
  return redis.error_reply('STALE_FENCE ' .. fence)
end
redis.call('HSET', KEYS[1], 'fence', ARGV[1])
"""
_CHECK_STEP = """
local step = redis.call('HGET', KEYS[1], 'step')
if step ~= ARGV[2] then return redis.error_reply('STEP_MISMATCH ' .. tostring(step)) end
"""
_WRITE_QUEUE = """
for level, draws in ipairs(cjson.decode(ARGV[4])) do
  local key = KEYS[3 + level]
  redis.call('DEL', key)
  for _, draw in ipairs(draws) do redis.call('RPUSH', key, draw) end
end
"""
CLAIM = _CHECK_FENCE + "return 1"
COMMIT = (
    _CHECK_FENCE
    + _CHECK_STEP
    + "redis.call('HSET', KEYS[1], 'step', ARGV[2] + 1, 'state', ARGV[3])"
    + _WRITE_QUEUE
    + """
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[5])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[6], '*', 'kind', 'step', 'value', ARGV[5])
return 1
"""
)
# ARGV[4]: the queue, empty where it is as it was. ARGV[6]: the ladder that was chosen, or empty.
BEGIN_STEP = (
    _CHECK_FENCE
    + _CHECK_STEP
    + """
redis.call('HSET', KEYS[1], 'state', ARGV[3])
local tell = function(kind, value)
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'kind', kind, 'value', value)
end
if ARGV[4] ~= '' then
"""
    + _WRITE_QUEUE
    + """
  tell('run', 'changed')
end
if ARGV[6] ~= '' then tell('ladder', ARGV[6]) end
return 1
"""
)
# KEYS[2] holds the outcome of the step, KEYS[3] its samples.
REOPEN_STEP = (
    _CHECK_FENCE
    + _CHECK_STEP
    + """
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[3])
redis.call('DEL', KEYS[3])
return 1
"""
)
REWIND = (
    _CHECK_FENCE
    + "redis.call('HSET', KEYS[1], 'step', ARGV[2], 'state', ARGV[3])"
    + _WRITE_QUEUE
    + """
local first = 4 + #cjson.decode(ARGV[4])
for _, record in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], ARGV[2], '+inf')) do
  redis.call('RPUSH', KEYS[first], record)
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], ARGV[2], '+inf')
for i = first + 1, #KEYS do redis.call('DEL', KEYS[i]) end
return 1
"""
)
# ARGV[7]: the states from which it may change, as " a b "; empty: from any. A status that is there
# already is no refusal: this may be the repeat of a call whose reply was lost.
SET_STATUS = (
    _CHECK_FENCE
    + """
local now = redis.call('HGET', KEYS[1], 'status')
if ARGV[7] ~= '' and not string.find(ARGV[7], ' ' .. now .. ' ', 1, true) then
  return now == ARGV[2] and 1 or 0
end
redis.call('HSET', KEYS[1], 'status', ARGV[2], 'failure', ARGV[3], 'stop_mode', ARGV[4],
           'pause_at', ARGV[5])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[6], '*', 'kind', 'run', 'value', ARGV[2])
return 1
"""
)
APPEND_CHANGE = (
    _CHECK_FENCE
    + """
redis.call('RPUSH', KEYS[2], ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'kind', 'run', 'value', 'changed')
return 1
"""
)
# ARGV[2], ARGV[3], ...: prompt id and row, in turn.
ADD_PROMPTS = (
    _CHECK_FENCE
    + """
local added = 0
for i = 2, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[3], ARGV[i], '') == 1 then
    redis.call('RPUSH', KEYS[2], ARGV[i + 1])
    added = added + 1
  end
end
return added
"""
)
