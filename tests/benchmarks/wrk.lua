-- POST with a key: a new one each time, or numbers 1 to `distinct` over and over.
-- Arguments: prefix of the keys, number of distinct keys (0: no end), body.
local prefix, distinct, sent

function init(args)
  prefix, distinct, sent = args[1], tonumber(args[2]), 0
  wrk.method = "POST"
  wrk.body = args[3]
  wrk.headers["Content-Type"] = "application/json"
end

function request()
  -- wrk throws the first request away after looking at it: the keys sent start at 1
  local number = distinct > 0 and sent % distinct + 1 or sent
  sent = sent + 1
  wrk.headers["Idempotency-Key"] = prefix .. number
  return wrk.format()
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\n{"requests": %d, "seconds": %f, "median_ms": %f, "errors": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3,
    errors.status + errors.connect + errors.read + errors.write + errors.timeout
  ))
end
