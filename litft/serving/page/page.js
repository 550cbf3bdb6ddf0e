// The chat page: a conversation with one model, or with two side by side.
import { listModels, streamAnswer } from "./api.js";
import { copyButton, showMarkdown } from "./markdown.js";

const element = id => document.getElementById(id);
const [model, other, key, settings, panel, chat, form, text, send, stop] =
  ["model", "other", "key", "settings", "panel", "chat", "form", "text", "send", "stop"].map(element);
const MEASURABLE = 10;  // tokens; the speed of shorter answers says nothing
const NUMBERS = ["temperature", "top_p", "max_tokens"];

let models = [];   // as listed by the server
let turns = [];    // the conversation: { text, answers: [{ model, text, reasoning }], section }; one answer per column
let running = null;  // the AbortController of the answers being generated

// ---- models and settings

async function loadModels() {
  try {
    models = await listModels(key.value);
  } catch (error) {
    if (error.status === 401) { key.hidden = false; key.focus(); }
    showError(chat, error.message);
    return false;
  }
  const names = models.map(({ id }) => id), selected = [model.value, other.value];
  model.replaceChildren(...names.map(name => new Option(name, name, false, name === selected[0])));
  other.replaceChildren(new Option("none", ""), ...names.map(name => new Option(name, name, false, name === selected[1])));
  element("compare").hidden = names.length < 2;
  const wanted = new URLSearchParams(location.search).get("compare");  // in the address that `serve --with_base` prints
  if (wanted && !selected[0]) other.value = names.includes(wanted) ? wanted : "";
  document.body.classList.toggle("comparing", other.value !== "");
  showDefaults();
  return true;
}

function showDefaults() {
  const defaults = models.find(({ id }) => id === model.value)?.defaults ?? {};
  for (const name of NUMBERS) element(name).placeholder = defaults[name] ?? "";
}

// The fields of a request. Empty settings are left to the server.
function sampling() {
  const values = NUMBERS.filter(name => element(name).value !== "").map(name => [name, Number(element(name).value)]);
  return Object.fromEntries(values);
}

// The model of each column.
function columns() {
  return other.value ? [model.value, other.value] : [model.value];
}

// ---- the conversation

// The messages that lead to a turn's answer in a column. A turn without an answer in this column has that of another one.
function messagesBefore(turn, column) {
  const system = element("system").value.trim(), messages = system ? [{ role: "system", content: system }] : [];
  for (const { text, answers } of turns.slice(0, turns.indexOf(turn))) {
    const answer = answers[column]?.text || answers.find(answer => answer.text).text;
    messages.push({ role: "user", content: text }, { role: "assistant", content: answer });
  }
  return [...messages, { role: "user", content: turn.text }];
}

async function ask(words) {
  for (const section of chat.querySelectorAll(".removed, :scope > .error")) section.remove();
  const turn = { text: words, answers: [], section: add(chat, "section", "turn") };
  turns.push(turn);
  showQuestion(turn);
  await generate(turn, columns().map((_, column) => column));
}

// Generate a turn's answers in some columns. If there is none, the turn is removed and its text can be sent again.
async function generate(turn, which) {
  const conversation = turns;
  running = new AbortController();
  setRunning(true);
  try {
    await Promise.all(which.map(column => generateAnswer(turn, column)));
  } finally {
    running = null;
    setRunning(false);
  }
  if (turns !== conversation) return;  // a new chat was started meanwhile
  if (!turn.answers.some(answer => answer.text)) {
    turns = turns.slice(0, -1);
    turn.section.classList.add("removed");  // what it says, such as an error, stays until the next message
    text.value ||= turn.text;
  }
  updateButtons();
}

async function generateAnswer(turn, column) {
  const answer = { model: columns()[column] ?? turn.answers[column].model, text: "", reasoning: "" };
  const article = answerArticle(turn, column, answer);
  const body = article.querySelector(".text"), note = article.querySelector(".note"), start = performance.now();
  turn.answers[column] = answer;
  let pieces = 0, first = 0, tokens = null, reason = null, ending = "", scheduled = 0;
  const render = () => {
    scheduled = 0;
    const follows = isAtEnd();
    showMarkdown(body, answer.text, answer.reasoning);
    const seconds = (performance.now() - (first || start)) / 1000, count = tokens ?? pieces;
    const speed = count >= MEASURABLE && seconds > 0 ? `, ${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
    note.textContent = `${count} token${count === 1 ? "" : "s"}${speed}${ending}`;
    if (follows) scrollToEnd();
  };
  try {
    const request = { model: answer.model, messages: messagesBefore(turn, column), ...sampling() };
    for await (const chunk of streamAnswer(request, key.value, running.signal)) {
      tokens = chunk.tokens ?? tokens;
      reason = chunk.reason ?? reason;
      if (!chunk.text && !chunk.reasoning) continue;
      first ||= performance.now();
      pieces += 1;
      answer.text += chunk.text;
      answer.reasoning += chunk.reasoning;
      scheduled ||= requestAnimationFrame(render);
    }
    if (reason === "length") ending = ", cut off at the maximum length";
    if (reason && !answer.text) ending = ", an empty answer";
  } catch (error) {
    if (error.name === "AbortError") ending = ", stopped";
    else showError(article, error.message);
    if (error.status === 401) key.hidden = false;
  }
  cancelAnimationFrame(scheduled);
  render();
}

// ---- what is on the page

function isAtEnd() {
  return chat.scrollHeight - chat.scrollTop - chat.clientHeight < 60;
}

function scrollToEnd() {
  chat.scrollTop = chat.scrollHeight;
}

function add(parent, tag, name, content = "") {
  const child = document.createElement(tag);
  child.className = name;
  child.textContent = content;
  parent.append(child);
  return child;
}

function addButton(parent, label, onclick) {
  const button = add(parent, "button", "", label);
  button.type = "button";
  button.onclick = onclick;
}

function showError(parent, message) {
  add(parent, "p", "error", message);
  scrollToEnd();
}

function showQuestion(turn) {
  const article = add(turn.section, "article", "user");
  article.setAttribute("aria-label", "You");
  add(article, "div", "text", turn.text);
  add(article, "footer", "buttons");
  add(turn.section, "div", "answers");
  scrollToEnd();
}

// An empty article for the answer in a column, in the place of an earlier one.
function answerArticle(turn, column, answer) {
  const container = turn.section.querySelector(".answers"), earlier = container.children[column];
  const article = add(container, "article", "assistant");
  if (earlier) earlier.replaceWith(article);
  add(article, "h2", "", answer.model);
  article.setAttribute("aria-label", answer.model);
  add(article, "div", "text");
  const footer = add(article, "footer", "");
  add(footer, "span", "note");
  add(footer, "span", "buttons");
  scrollToEnd();
  return article;
}

function setRunning(isRunning) {
  send.hidden = isRunning;
  stop.hidden = !isRunning;
  chat.setAttribute("aria-busy", isRunning);
  if (!isRunning) return;
  for (const { section, text } of turns) section.querySelector(".user .text").textContent = text;  // closes its editor
  for (const buttons of chat.querySelectorAll(".buttons")) buttons.replaceChildren();
}

// The buttons below each message, while nothing is generated.
function updateButtons() {
  const follows = isAtEnd();
  for (const turn of turns) {
    const question = turn.section.querySelector(".user .buttons");
    question.replaceChildren();
    addButton(question, "Edit", () => edit(turn));
    turn.answers.forEach((answer, column) => {
      const buttons = turn.section.querySelectorAll(".assistant .buttons")[column];
      buttons.replaceChildren(...(answer.text ? [copyButton(() => answer.text)] : []));
      if (turn === turns.at(-1)) addButton(buttons, "Regenerate", () => generate(turn, [column]));
    });
  }
  if (follows) scrollToEnd();
}

// Edit a message in its place. Sending it removes the turns after it.
function edit(turn) {
  const article = turn.section.querySelector(".user"), body = article.querySelector(".text");
  const editor = document.createElement("textarea"), buttons = article.querySelector(".buttons");
  editor.className = "editor";
  editor.setAttribute("aria-label", "Edit message");
  editor.value = turn.text;
  editor.rows = Math.min(12, turn.text.split("\n").length + 1);
  body.replaceChildren(editor);
  buttons.replaceChildren();
  addButton(buttons, "Send", () => {
    if (!editor.value.trim() || running) return;
    for (const { section } of turns.splice(turns.indexOf(turn))) section.remove();
    ask(editor.value.trim());
  });
  addButton(buttons, "Cancel", () => {
    body.textContent = turn.text;
    updateButtons();
    buttons.querySelector("button").focus();
  });
  editor.focus();
}

form.onsubmit = async event => {
  event.preventDefault();
  const words = text.value.trim();
  if (!words || running || (!model.value && !await loadModels())) return;
  text.value = "";
  await ask(words);
  if ([document.body, text].includes(document.activeElement)) text.focus();
};
text.onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
};
stop.onclick = () => running?.abort();
element("clear").onclick = () => { running?.abort(); turns = []; chat.replaceChildren(); text.focus(); };
settings.onclick = () => { panel.hidden = !panel.hidden; settings.setAttribute("aria-expanded", !panel.hidden); };
model.onchange = showDefaults;
other.onchange = () => document.body.classList.toggle("comparing", other.value !== "");
key.onchange = () => {
  for (const error of chat.querySelectorAll(":scope > .error")) error.remove();
  loadModels();
};
loadModels();
text.focus();
