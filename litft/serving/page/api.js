// The server's API: the list of models, and streamed answers.

export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// The models: [{ id, defaults: { temperature, top_p, max_tokens } }, ...].
export async function listModels(key) {
  const response = await fetch("v1/models", { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return (await response.json()).data;
}

// Yields { text, reasoning, tokens, reason } for each event of an answer; tokens and reason come with the last ones.
export async function* streamAnswer(request, key, signal) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(key), body, signal });
  if (!response.ok) throw await failure(response);
  for await (const event of events(response)) {
    if (event.error) throw new RequestError(event.error.message);
    const choice = event.choices[0];
    yield {
      text: choice?.delta.content ?? "",
      reasoning: choice?.delta.reasoning_content ?? "",
      tokens: event.usage?.completion_tokens,
      reason: choice?.finish_reason,
    };
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return new RequestError(body?.error?.message ?? `the server responded with status ${response.status}`, response.status);
}

// The objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (buffer + value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
