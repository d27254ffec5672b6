// Shows the tries of `idempotent-fetch.js`, and states of operations, to people.

const brief = (text) => text.replace(/([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}/g, "$1…");

const MEANINGS = { 200: "OK", 201: "created" };

function words(event) {
  switch (event.type) {
    case "sent":
      return ["sent", `${event.method} ${brief(event.url)}`, event.key ? `key ${brief(event.key)}` : "no key"];
    case "lost":
      return ["lost", "The connection broke. Did it work? Nobody knows.", ""];
    case "waiting":
      return ["wait", `Trying again in ${(event.wait / 1000).toFixed(1)} s`, ""];
    case "answered": {
      const order = event.data?.number ? `order ${event.data.number}` : (event.data?.title ?? event.data?.detail ?? MEANINGS[event.status] ?? "");
      const kind = event.status < 300 ? "good" : "bad";
      return [event.replayed ? "replay" : kind, `${event.status} ${order}`, event.replayed ? "Idempotent-Replayed: true" : ""];
    }
  }
}

/** Shows `text` in the element `place`; `kind` is "good", "bad", "wait" or "". */
export function say(place, text, kind = "") {
  place.textContent = text;
  place.className = `state ${kind}`;
  place.hidden = false;
}

const KINDS = { succeeded: "good", failed: "bad", reversed: "" };

/** A `report` function for `follow` that shows the operation's state in `place`. */
export const showIn = (place) => (state) => say(place, `${state.title}. ${state.message}`, KINDS[state.status] ?? "wait");

/** A `report` function for `send` that writes into the list element `list`. */
export function logTo(list) {
  return (event) => {
    const [kind, text, detail] = words(event);
    const item = document.createElement("li");
    item.className = kind;
    item.append(text);
    if (detail) {
      const note = document.createElement("code");
      note.textContent = detail;
      item.append(" ", note);
    }
    list.querySelector(".muted")?.remove();
    list.append(item);
    list.scrollTop = list.scrollHeight;
  };
}

export const csrf = () => ({ "X-CSRFToken": document.querySelector("[name=csrfmiddlewaretoken]").value });
