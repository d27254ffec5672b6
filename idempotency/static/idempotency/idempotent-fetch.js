// One intent, one key, however many tries. No dependencies.

const WAIT_BASE = 300; // ms, doubled per try
const WAIT_MAX = 10_000; // ms
const TIMEOUT = 30_000; // ms per try

/**
 * The key of the intent `name` with this `body`. It survives a reload of the page, and changes
 * when the user wants something else. Call `forget(name)` once the outcome is known.
 */
export function keyFor(name, body) {
  const wanted = JSON.stringify(body);
  try {
    const kept = JSON.parse(sessionStorage.getItem(`intent:${name}`));
    if (kept?.wanted === wanted) return kept.key;
  } catch {
    // Unreadable: somebody else's entry. A new one replaces it.
  }
  const key = newKey();
  sessionStorage.setItem(`intent:${name}`, JSON.stringify({ key, wanted }));
  return key;
}

export function forget(name) {
  sessionStorage.removeItem(`intent:${name}`);
}

/** A random UUID; `crypto.randomUUID` itself exists only on HTTPS and localhost. */
export function newKey() {
  if (crypto.randomUUID) return crypto.randomUUID();
  const hex = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte, i) => {
    if (i === 6) byte = (byte & 0x0f) | 0x40;
    if (i === 8) byte = (byte & 0x3f) | 0x80;
    return byte.toString(16).padStart(2, "0");
  }).join("");
  return hex.replace(/(.{8})(.{4})(.{4})(.{4})(.{12})/, "$1-$2-$3-$4-$5");
}

/**
 * Send `body` as JSON until there is an answer that will not change.
 *
 * Tries again after a network error, a 5xx, and a 409 or 429 that says so; waits as long as
 * `Retry-After` asks. Everything else is final, a 422 (same key, other request) above all.
 *
 * `loseFirst`: hang up on the first try this many milliseconds after sending it.
 * `report(event)`: told of every try: {type: "sent" | "lost" | "answered" | "waiting", …}.
 *
 * Resolves to {response, data}; throws the last network error when all tries failed.
 */
export async function send(url, { method = "POST", headers = {}, body, key, tries = 6, loseFirst = 0, report = () => {} }) {
  for (let attempt = 1; ; attempt++) {
    const last = attempt >= tries;
    const hangUp = new AbortController();
    const timer = setTimeout(() => hangUp.abort(), attempt === 1 && loseFirst ? loseFirst : TIMEOUT);
    let wait;
    try {
      report({ type: "sent", attempt, method, url, key });
      const response = await fetch(url, {
        method,
        headers: { "Content-Type": "application/json", ...(key && { "Idempotency-Key": `"${key}"` }), ...headers },
        body: JSON.stringify(body),
        credentials: "same-origin",
        signal: hangUp.signal,
      });
      const data = await response.json().catch(() => null);
      report({ type: "answered", attempt, status: response.status, replayed: response.headers.get("Idempotent-Replayed") === "true", data });
      if (last || !worthAnotherTry(response.status, data)) return { response, data };
      wait = retryAfter(response);
    } catch (error) {
      report({ type: "lost", attempt, error });
      if (last) throw error;
    } finally {
      clearTimeout(timer);
    }
    // Half fixed, half random, so that clients who failed together do not come back together.
    const backoff = Math.min(WAIT_MAX, WAIT_BASE * 2 ** (attempt - 1)) * (0.5 + Math.random() / 2);
    wait = Math.max(wait ?? 0, backoff);
    report({ type: "waiting", attempt, wait });
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

/**
 * Ask `url` (a `status_url`) until nothing changes by itself any more, as often as `Retry-After` asks.
 *
 * For a 409 `outcome-unknown`, which must not be sent again, and for a 202. `report(state)`: told of
 * every answer. Resolves to the last state (offer a retry only if its `safe_to_retry` says so), null if
 * there is none or `patience` (ms) is over.
 */
export async function follow(url, { headers = {}, patience = 120_000, report = () => {} } = {}) {
  for (const end = Date.now() + patience; Date.now() < end; ) {
    let wait = WAIT_BASE;
    try {
      const response = await fetch(url, { headers, credentials: "same-origin", signal: AbortSignal.timeout(TIMEOUT) });
      if (response.status < 500 && !response.ok) return null;
      const state = response.ok ? await response.json() : null;
      if (state) report(state);
      if (state && state.key_action !== "wait") return state;
      wait = retryAfter(response) ?? wait;
    } catch {
      // No answer; asking again is harmless.
    }
    await new Promise((resolve) => setTimeout(resolve, Math.min(WAIT_MAX, Math.max(WAIT_BASE, wait))));
  }
  return null;
}

/** Whether this answer settles the intent. Only then may its key be forgotten. */
export function isFinal(response, data) {
  return !worthAnotherTry(response.status, data) && data?.key_action !== "wait";
}

function worthAnotherTry(status, data) {
  if (status === 409) return data?.retryable === true;
  return status === 429 || status >= 500;
}

/** What `Retry-After` asks for, in milliseconds: seconds or a date. */
function retryAfter(response) {
  const value = response.headers.get("Retry-After");
  if (!value) return undefined;
  const seconds = Number(value);
  const wait = Number.isNaN(seconds) ? Date.parse(value) - Date.now() : seconds * 1000;
  return Number.isNaN(wait) ? undefined : Math.max(0, wait);
}
