// The checkout button: saves the address (PUT, no key), then places and pays the order (one key).

import { forget, keyFor, send } from "./idempotent-fetch.js";
import { csrf, logTo } from "./log.js";

const LOSE_AFTER = 250; // ms: the request has arrived, the provider is still thinking

const form = document.getElementById("checkout");
const button = document.getElementById("pay");
const state = document.getElementById("state");

function say(text, kind = "") {
  state.textContent = text;
  state.className = `state ${kind}`;
  state.hidden = false;
}

async function pay() {
  const report = logTo(document.getElementById("log"));
  const { lose, card, address, recipient, street, postcode, city, country } = form.elements;

  const saved = await send(`${form.dataset.address}${address.value}/`, {
    method: "PUT",
    headers: csrf(),
    body: { recipient: recipient.value, street: street.value, postcode: postcode.value, city: city.value, country: country.value },
    report,
  });
  if (!saved.response.ok) return say("The address could not be saved.", "bad");

  const intent = `checkout:${form.dataset.user}`;
  const body = { lines: JSON.parse(document.getElementById("lines").textContent), address: address.value, card: card.value };
  const { response, data } = await send(form.dataset.checkout, {
    headers: csrf(),
    body,
    key: keyFor(intent, body),
    loseFirst: lose.checked ? LOSE_AFTER : 0,
    report,
  });

  if (response.status === 409 && data?.key_action === "wait") {
    return say("Your payment is being checked. Please do not pay again.", "wait");
  }
  if (response.status >= 500 || response.status === 429) {
    return say("The shop does not answer. Pressing Pay again is safe.", "bad");
  }
  forget(intent); // final, whatever it is: the next press is a new intent
  if (!response.ok) return say(data?.detail ?? "The order was refused.", "bad");

  say(`Paid. Order ${data.number}, charged once.`, "good");
  const link = document.createElement("a");
  link.href = `${form.dataset.order}${data.id}/`;
  link.textContent = "See the order";
  state.append(" ", link);
  return true;
}

form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  button.disabled = true;
  say("Processing…", "wait");
  let done = false;
  try {
    done = await pay();
  } catch {
    say("No connection. Pressing Pay again is safe: it is the same order.", "bad");
  }
  button.disabled = Boolean(done);
});
