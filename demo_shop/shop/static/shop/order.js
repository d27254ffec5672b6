// An order's page: what its payment is doing, and only those buttons that are safe to press.

import { follow, forget, keyFor, send } from "../idempotency/idempotent-fetch.js";
import { csrf, logTo, say, showIn } from "./log.js";

// What the end of an operation means for an order; meanwhile the operation's own words will do.
const ENDS = {
  paid: ["Paid. Your card was charged once.", "good"],
  refunded: ["Refunded. Your money is on its way back.", ""],
  cancelled: ["Not paid. Nothing was taken from your card.", "bad"],
};
const LOSE_AFTER = 250; // ms: the request has arrived, the provider is still thinking

const page = document.getElementById("order");
const state = document.getElementById("state");
const form = document.getElementById("pay");
const refund = document.getElementById("refund");
const report = logTo(document.getElementById("log"));
const { status, operation, id } = page.dataset;

const reload = () => location.replace(location.pathname);

async function count() {
  const response = await fetch(page.dataset.evidence, { credentials: "same-origin" });
  if (!response.ok) return;
  for (const [what, times] of Object.entries(await response.json())) {
    page.querySelector(`[data-count=${what}]`).textContent = times;
  }
}

/** Show the payment's state; when it ends differently from what the page was made for, make it anew. */
async function watch() {
  if (new URLSearchParams(location.search).get("back") === "bank") {
    say(state, "Asking whether your bank has paid…", "wait");
    await send(page.dataset.confirm, { headers: csrf(), body: {}, report });
  }
  const end = await follow(operation, { report: showIn(state) });
  if (!end) return;
  if (ENDS[status]) say(state, ...ENDS[status]);
  else if (end.status === "requires_action") {
    const link = document.createElement("a");
    link.href = end.result?.action_url ?? "#";
    link.textContent = "Go to your bank";
    if (end.result?.action_url) state.append(" ", link);
  } else if (status === "placed" || status === "refunding") {
    reload();
  }
}

async function pay() {
  const { card, mode, webhooks, lose } = form.elements;
  const body = { card: card.value, mode: mode.value, webhooks: webhooks.value };
  const intent = `pay:${id}`;
  const { response, data } = await send(page.dataset.pay, {
    headers: csrf(),
    body,
    key: keyFor(intent, body),
    loseFirst: lose.checked ? LOSE_AFTER : 0,
    report,
  });
  if (response.status >= 500 || response.status === 429) return say(state, "The shop does not answer. Pressing Pay again is safe.", "bad");
  if (response.status === 409 && data?.key_action === "wait") return reload(); // the page shows how it goes on
  forget(intent); // final: the next press is a new intent
  if (response.status === 202) return location.assign(data.action_url);
  if (!response.ok) return say(state, data?.detail ?? "The payment was refused.", "bad");
  reload();
}

form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("button");
  button.disabled = true;
  say(state, "Processing…", "wait");
  await pay().catch(() => say(state, "No connection. Pressing Pay again is safe: it is the same payment.", "bad"));
  button.disabled = false;
});

// Needs no key: an order can be refunded only once, however often that is said.
refund?.addEventListener("click", async () => {
  refund.disabled = true;
  say(state, "Refunding…", "wait");
  try {
    const { response, data } = await send(page.dataset.refund, { headers: csrf(), body: {}, report });
    if (response.ok) return reload();
    say(state, data?.detail ?? data?.title ?? "Not refunded yet. Pressing it again is safe.", "bad");
  } catch {
    say(state, "No connection. Pressing it again is safe.", "bad");
  }
  refund.disabled = false;
});

count();
setInterval(count, 2000);
if (operation) watch();

// A page that the back button brings back as it was left would show an old state.
addEventListener("pageshow", (event) => event.persisted && location.reload());
