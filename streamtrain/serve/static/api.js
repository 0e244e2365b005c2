// The server, as this page asks it. Paths are relative, so the page works below any prefix of a proxy.

const ANSWER_MS = 10_000;

export const model = document.documentElement.dataset.model;
const base = `v1/models/${encodeURIComponent(model)}`;

/** Where the token that was typed in is: in sessionStorage, so it ends with the tab. */
export const KEPT = "streamtrain.token";

/** An answer other than 2xx; or none, which is status 0. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Answers `{ json, headers }`; throws Refused. */
export async function ask(path, { method = "GET", body, token = sessionStorage.getItem(KEPT) } = {}) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (token) headers.authorization = `Bearer ${token}`;
  let answer, json;
  try {
    const sent = body === undefined ? undefined : JSON.stringify(body);
    answer = await fetch(base + path, { method, headers, body: sent, cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    json = await answer.json();
  } catch (error) {
    if (answer) throw new Refused(answer.status, `the answer is not JSON: ${error.message}`);
    throw new Refused(0, "the endpoint does not answer");
  }
  if (!answer.ok) throw new Refused(answer.status, json.error ?? `status ${answer.status}`);
  return { json, headers: answer.headers };
}
