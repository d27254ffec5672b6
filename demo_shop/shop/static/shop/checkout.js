// The checkout button: saves the address (PUT, no key), then places and pays the order (one key).

import { follow, forget, keyFor, send } from "../idempotency/idempotent-fetch.js";
import { csrf, logTo, say, showIn } from "./log.js";

const LOSE_AFTER = 250; // ms: the request has arrived, the provider is still thinking

const form = document.getElementById("checkout");
const button = document.getElementById("pay");
const state = document.getElementById("state");

async function pay() {
  const report = logTo(document.getElementById("log"));
  const { lose, card, mode, webhooks, address, recipient, street, postcode, city, country } = form.elements;

  const saved = await send(`${form.dataset.address}${address.value}/`, {
    method: "PUT",
    headers: csrf(),
    body: { recipient: recipient.value, street: street.value, postcode: postcode.value, city: city.value, country: country.value },
    report,
  });
  if (!saved.response.ok) return say(state, "The address could not be saved.", "bad");

  const intent = `checkout:${form.dataset.user}`;
  const body = { lines: JSON.parse(document.getElementById("lines").textContent), address: address.value, card: card.value, mode: mode.value, webhooks: webhooks.value };
  const options = { headers: csrf(), body, key: keyFor(intent, body), report };
  let { response, data } = await send(form.dataset.checkout, { ...options, loseFirst: lose.checked ? LOSE_AFTER : 0 });

  if (response.status === 409 && data?.status_url && data.key_action === "wait") {
    say(state, "Checking. We do not know yet whether your card was charged. Please do not pay again.", "wait");
    const outcome = await follow(data.status_url, { report: showIn(state) });
    if (!outcome) return say(state, "Still being checked. Please do not pay again; your orders will show it.", "wait");
    ({ response, data } = await send(form.dataset.checkout, options)); // the same key: the stored answer
  }
  if (response.status >= 500 || response.status === 429) {
    return say(state, "The shop does not answer. Pressing Pay again is safe.", "bad");
  }
  forget(intent); // final, whatever it is: the next press is a new intent
  if (!response.ok) return say(state, data?.detail ?? "The order was refused.", "bad");

  if (response.status === 202) return location.assign(data.action_url);
  document.querySelector("nav .pill").textContent = 0; // the cart
  say(state, `Paid. Order ${data.number}, charged once.`, "good");
  const link = document.createElement("a");
  link.href = `${form.dataset.order}${data.id}/`;
  link.textContent = "See the order";
  state.append(" ", link);
  return true;
}

form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  button.disabled = true;
  say(state, "Processing…", "wait");
  let done = false;
  try {
    done = await pay();
  } catch {
    say(state, "No connection. Pressing Pay again is safe: it is the same order.", "bad");
  }
  button.disabled = Boolean(done);
});

// A page that the back button brings back as it was left would show an old state.
addEventListener("pageshow", (event) => event.persisted && location.reload());
