// The dialog that asks once more before something changes.

import { byId, setText } from "./dom.js";

/**
 * Asks once more, acts, and says what came of it in the element `outcome`; what is refused unless it is forced can be
 * forced. `act` is given `{ why, force }` as far as they are set; `done` makes a sentence of the server's answer.
 */
export function confirmThen({ title, text, yes, forced, outcome, act, done }) {
  const dialog = byId("confirm"), button = byId("confirm-yes"), why = byId("confirm-why");
  let force = false;
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-error"), "");
  setText(button, yes);
  why.value = "";
  button.disabled = false;
  dialog.querySelector("form").onsubmit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      const { json } = await act({ ...(why.value && { why: why.value }), ...(force && { force }) });
      dialog.close();
      setText(byId(outcome), done(json));
      byId(outcome).focus(); // the button that had it may be of a table that changes now
    } catch (error) {
      setText(byId("confirm-error"), error.message);
      if (error.status === 409 && error.message.includes('"force"')) {
        force = true;
        setText(button, forced);
      }
    } finally {
      button.disabled = false;
    }
  };
  dialog.showModal();
}
