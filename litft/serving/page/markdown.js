// Answers as formatted text. A model's output is not trusted: it may repeat what someone put into its data or its prompt.
/* global marked, DOMPurify */

// HTML in an answer is shown as text. Images are links: loading one would tell its server that the answer was read.
const escape = text => text.replace(/[&<>"]/g, char => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[char]);
marked.use({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "&#9745; " : "&#9744; "),
  },
});

// A second line of defence, which does not depend on the renderer: only what Markdown needs.
const ALLOWED = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

// Shows Markdown in an element, with the reasoning before it folded away.
export function showMarkdown(element, text, reasoning) {
  const isOpen = element.querySelector("details")?.open ?? false;
  const parts = reasoning ? [folded(reasoning, isOpen)] : [];
  element.replaceChildren(...parts, rendered(text));
}

function folded(text, open) {
  const details = document.createElement("details"), summary = document.createElement("summary");
  const body = document.createElement("pre");
  summary.textContent = "Thinking";
  body.textContent = text;
  details.append(summary, body);
  details.open = open;
  return details;
}

function rendered(text) {
  let html;
  try {
    html = marked.parse(text);
  } catch {  // deeply nested output, such as a loop of ">", exceeds the call stack
    html = `<pre><code>${escape(text)}</code></pre>`;
  }
  const fragment = DOMPurify.sanitize(html, ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of fragment.querySelectorAll("pre")) block.append(copyButton(() => block.querySelector("code").textContent));
  return fragment;
}

// A button that copies the text that the function returns.
export function copyButton(getText) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.onclick = async () => {
    await copy(getText());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");  // over plain HTTP, browsers offer the clipboard on localhost only
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
