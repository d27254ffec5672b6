// Two tills, one retry loop. The right one sends a key.

import { follow, newKey, send } from "../idempotency/idempotent-fetch.js";
import { csrf, logTo } from "./log.js";

const LOSE_AFTER = 250; // ms: the request has arrived, the provider is still thinking

const page = document.getElementById("tills");
const tills = [...page.querySelectorAll("[data-till]")];
const mismatch = page.querySelector("[data-act=mismatch]");
const fault = (name) => page.querySelector(`.faults [name=${name}]`);
const purchase = (quantity) => ({
  lines: [{ product: Number(page.dataset.product), quantity }],
  card: "tok_visa",
  mode: fault("mode").value,
  webhooks: fault("webhooks").value,
});

let start; // the counters when this experiment began
let intents = 0; // what the person wanted so far
let lastKey;

async function count() {
  const response = await fetch(page.dataset.counters, { credentials: "same-origin" });
  if (!response.ok) return;
  const now = await response.json();
  start ??= now;
  for (const till of tills) {
    const name = till.dataset.till;
    const delta = {};
    for (const what of ["orders", "charges", "emails"]) {
      delta[what] = now[name][what] - start[name][what];
      till.querySelector(`[data-count=${what}]`).textContent = delta[what];
    }
    till.classList.toggle("over", delta.charges > intents);
    judge(till, delta);
  }
  page.querySelector("[data-count=addresses]").textContent = now.addresses;
  for (const what of ["received", "duplicates"]) {
    page.querySelector(`[data-count=${what}]`).textContent = now.webhooks[what] - start.webhooks[what];
  }
}

function judge(till, { charges }) {
  const verdict = till.querySelector(".verdict");
  if (!intents) verdict.textContent = "Press a button above.";
  else if (charges > intents) verdict.textContent = `Wanted ${intents}, charged ${charges} times.`;
  else if (charges === intents) verdict.textContent = `Wanted ${intents}, charged ${charges}. As it should be.`;
  else verdict.textContent = "Working…";
}

async function buy(till, key, loseFirst) {
  const options = { headers: csrf(), body: purchase(1), key, report: logTo(till.querySelector(".log")) };
  try {
    const { response, data } = await send(till.dataset.url, { ...options, loseFirst });
    if (response.status === 409 && data?.status_url && (await follow(data.status_url))) await send(till.dataset.url, options);
  } catch {
    // Every try was lost; the log says so.
  }
}

const acts = {
  async pay() {
    intents += 1;
    const loseFirst = fault("lose").checked ? LOSE_AFTER : 0;
    lastKey = newKey();
    // One till after the other: on SQLite, which has one writer, they would hold each other up.
    for (const till of tills) await buy(till, "keyed" in till.dataset ? lastKey : undefined, loseFirst);
  },
  async hammer() {
    intents += 1;
    lastKey = newKey();
    await Promise.all(tills.flatMap((till) => Array.from({ length: 5 }, () => buy(till, "keyed" in till.dataset ? lastKey : undefined, 0))));
  },
  async mismatch() {
    const till = tills.find((each) => "keyed" in each.dataset);
    await send(till.dataset.url, { headers: csrf(), body: purchase(2), key: lastKey, report: logTo(document.getElementById("mismatch-log")) });
  },
  async address() {
    const url = `${page.dataset.addresses}${newKey()}/`;
    const body = { recipient: "Carla Customer", street: "3 Upsert Square", postcode: "30300", city: "Sameville", country: "Utopia" };
    for (let i = 0; i < 3; i++) {
      await send(url, { method: "PUT", headers: csrf(), body, report: logTo(document.getElementById("address-log")) });
    }
  },
  async reset() {
    start = undefined;
    intents = 0;
    page.querySelectorAll(".log").forEach((list) => list.replaceChildren());
  },
};

page.addEventListener("click", async (event) => {
  const act = event.target.dataset?.act;
  if (!act) return;
  const buttons = [...page.querySelectorAll("button")];
  buttons.forEach((button) => (button.disabled = true));
  const watching = setInterval(count, 500);
  try {
    await acts[act]();
  } finally {
    clearInterval(watching);
    await count();
    buttons.forEach((button) => (button.disabled = false));
    mismatch.disabled = !lastKey;
  }
});

count();
setInterval(count, 2000); // e-mails and webhooks come later
