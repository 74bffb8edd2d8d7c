"use strict";
// The page of `subquad serve`: asks /v1/models what there is, and shows tokens of /v1/completions as they come.
(() => {
  const $ = (id) => document.getElementById(id);
  const make = (tag, css, text) => {
    const e = document.createElement(tag);
    if (css) e.className = css;
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const short = (v) => (v >= 100 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(3))));
  const bytes = (v) => {
    const power = Math.max(0, Math.min(4, Math.floor(Math.log10(v || 1) / 3)));
    return `${short(v / 1000 ** power)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
  };
  const counted = (n, thing) => `${n.toLocaleString("en")} ${thing}${n === 1 ? "" : "s"}`;
  const form = $("ask"), prompt = $("prompt");
  let key = "", model = null, turns = [], running = null;
  try { key = sessionStorage.getItem("subquad-key") ?? ""; } catch { /* some browsers allow no storage */ }

  class Problem extends Error {
    constructor(message, status) { super(message); this.status = status; }
  }

  // What a failed answer says, in words.
  async function problem(answer) {
    let said = "";
    try { said = (await answer.json()).error.message; } catch { said = `the server answered ${answer.status} ${answer.statusText}`; }
    const wait = answer.status === 429 && answer.headers.get("retry-after");
    return new Problem(wait ? `${said}. Try again in ${wait} s.` : said, answer.status);
  }

  async function call(path, body, signal) {
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    if (body) headers["content-type"] = "application/json";
    let answer;
    try {
      answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("The server cannot be reached: it has stopped, or the connection is down.", 0);
    }
    if (!answer.ok) throw await problem(answer);
    return answer;
  }

  // The events of a stream; one may come in several parts.
  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      let part;
      try { part = await reader.read(); } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Problem("The connection broke before the answer was complete.", 0);
      }
      if (part.done) throw new Problem("The server ended the connection before the answer was complete.", 0);
      rest += part.value;
      const whole = rest.split("\n\n");
      rest = whole.pop();
      for (const event of whole) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const read = JSON.parse(data);
        if (read.error) throw new Problem(read.error.message, 500);
        yield read;
      }
    }
  }

  function tell(error) {
    const asksKey = error.status === 401;
    $("problem").hidden = false;
    $("problem").textContent = asksKey && !key ? "This server asks for an API key." : error.message;
    if (!asksKey) return;
    if (!model) $("about").textContent = "";
    $("door").hidden = false;
    $("key").focus();
  }

  async function begin() {
    $("problem").hidden = true;
    try {
      model = (await (await call("/v1/models")).json()).data[0];
    } catch (error) { return tell(error); }
    const about = model.subquad;
    $("door").hidden = true;
    form.hidden = false;
    $("name").textContent = model.id;
    document.title = `${model.id} – subquad serve`;
    const words = [`${about.mechanisms.join(", ")}`, `${short(about.parameters / 1e6)} million parameters`, `${about.dtype} on ${about.device}`];
    $("about").textContent = `${words.join(" · ")}. A prompt and its answer may have up to ${about.longest.toLocaleString("en")} tokens.`;
    form.elements.max_tokens.max = Math.max(1, about.longest - 1); // a prompt has a token at least
    form.elements.max_tokens.value = Math.min(256, form.elements.max_tokens.max);
    $("modes").hidden = !about.chat;
    $("words").hidden = $("most").hidden = Boolean(about.image);
    $("many").hidden = !about.image;
    $("keys").hidden = Boolean(about.image);
    if (about.writes !== "text") $("prompt-label").textContent = "Tokens to continue: numbers with spaces between them";
    change();
    figures();
    server();
  }

  const chatting = () => Boolean(model?.subquad.chat) && form.elements.mode.value === "chat";

  function change() { // between continuing a text and a chat
    const image = model.subquad.image;
    $("start").textContent = image ? "Draw" : chatting() ? "Send" : "Write";
    $("result-title").textContent = image ? "What the model draws" : chatting() ? "Chat" : "What the model writes";
    if (model.subquad.writes === "text") {
      $("prompt-label").textContent = chatting() ? "Your message" : "Text to continue";
      prompt.placeholder = chatting() ? "" : "It was a dark night, and";
    }
    clear();
  }

  function clear() {
    if (running) running.abort();
    running = null;
    $("start").disabled = false;
    $("stop").disabled = true;
    turns = [];
    seen = undefined;
    $("text").replaceChildren();
    $("images").replaceChildren();
    $("result").hidden = $("figures").hidden = $("more").hidden = $("problem").hidden = true;
    $("status").textContent = "";
  }

  // What is asked of the server.
  function asked() {
    const fields = form.elements, image = model.subquad.image;
    const body = {
      stream: true, stream_options: { include_usage: true }, temperature: Number(fields.temperature.value),
      top_p: Number(fields.top_p.value), max_tokens: Number(fields.max_tokens.value),
    };
    if (fields.seed.value !== "") body.seed = Number(fields.seed.value);
    if (image) return { ...body, prompt: "", n: Number(fields.count.value), max_tokens: image.tokens, ignore_eos: true };
    if (!chatting()) return { ...body, prompt: prompt.value };
    return { ...body, messages: turns };
  }

  // A place for each choice: a function that takes its new text and tokens; called without any, it shows what it has.
  function places(body) {
    const image = model.subquad.image;
    $("text").hidden = Boolean(image);
    if (image) return drawings(image, body.n);
    const own = make("span", "new");
    if (chatting()) {
      const turn = make("p", "turn assistant");
      turn.append(make("b", "", "model"), own);
      $("text").append(turn);
    } else $("text").replaceChildren(make("span", "given", body.prompt), own);
    let waiting = "";
    const write = () => {
      const box = $("text"), low = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      own.append(waiting);
      waiting = "";
      if (low) box.scrollTop = box.scrollHeight;
    };
    return [(text) => {
      if (!text) return write();
      if (!waiting) requestAnimationFrame(write); // at most once for each picture that the screen shows
      waiting += text;
    }];
  }

  function drawings({ rows, columns, channels, shades }, count) {
    $("images").className = count === 1 ? "images one" : "images";
    $("images").replaceChildren();
    return Array.from({ length: count }, (_, number) => {
      const canvas = make("canvas"), total = rows * columns * channels;
      canvas.width = columns;
      canvas.height = rows;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `image ${number + 1} of ${count}`);
      $("images").append(canvas);
      const pen = canvas.getContext("2d"), pixels = pen.createImageData(columns, rows);
      let at = 0;
      return (_text, new_tokens) => {
        for (const token of new_tokens.slice(0, total - at)) {
          const value = Math.round((255 * token) / (shades - 1)), pixel = 4 * Math.floor(at / channels);
          if (channels === 1) pixels.data.fill(value, pixel, pixel + 3);
          else pixels.data[pixel + (at % channels)] = value;
          if (at % channels === channels - 1) pixels.data[pixel + 3] = 255;
          at++;
        }
        pen.putImageData(pixels, 0, 0);
        if (at === total) canvas.setAttribute("aria-label", `image ${number + 1} of ${count}, complete`);
      };
    });
  }

  let seen; // of the request that runs or ran last

  async function start() {
    if (!form.reportValidity() || running) return;
    const mine = (running = new AbortController());
    $("problem").hidden = $("more").hidden = true;
    const before = { turns: [...turns], shown: [...$("text").childNodes], images: [...$("images").childNodes], kind: $("images").className, seen, message: prompt.value };
    if (chatting()) {
      if (!prompt.value.trim()) { running = null; return; }
      turns.push({ role: "user", content: prompt.value });
      const turn = make("p", "turn");
      turn.append(make("b", "", "you"), make("span", "", prompt.value));
      $("text").append(turn);
      prompt.value = "";
    }
    const body = asked(), put = places(body);
    seen = { begun: performance.now(), first: null, last: null, made: 0, streams: put.length, read: null, cached: null, early: 0 };
    let written = "", end = "";
    $("result").hidden = $("figures").hidden = false;
    $("start").disabled = true;
    $("stop").disabled = false;
    $("status").textContent = "waiting for the first token …";
    figures();
    watch(mine);
    $("result").setAttribute("aria-busy", "true");
    try {
      const answer = await call(chatting() ? "/v1/chat/completions" : "/v1/completions", body, mine.signal);
      for await (const event of events(answer)) {
        for (const choice of event.choices) {
          const text = choice.text ?? choice.delta.content ?? "", made = choice.tokens ?? [];
          if (text || made.length) put[choice.index](text, made);
          written += text;
          end = choice.finish_reason ?? end;
          if (!made.length) continue;
          seen.last = performance.now();
          if (seen.first === null) { seen.first = seen.last; seen.early = made.length; $("status").textContent = body.n ? "drawing …" : "writing …"; }
          seen.made += made.length;
        }
        if (event.usage) {
          seen.read = event.usage.prompt_tokens;
          seen.cached = event.usage.prompt_tokens_details.cached_tokens;
        }
        figures();
      }
      $("status").textContent = end === "stop" ? "The model ended its text." : body.n ? "All pixels are drawn." : `The end: ${counted(seen.made, "token")}, as asked.`;
    } catch (error) {
      if (mine !== running) return; // cleared meanwhile
      if (error.name === "AbortError") $("status").textContent = "Stopped.";
      else {
        $("status").textContent = "";
        tell(error instanceof Problem ? error : new Problem(`This page failed: ${error.message}`, 0));
      }
    }
    if (mine !== running) return;
    running = null;
    for (const show of put) show("", []);
    const began = seen.made > 0;
    if (!began) { // as if nothing had been asked
      $("text").replaceChildren(...before.shown);
      $("images").replaceChildren(...before.images);
      $("images").className = before.kind;
      if (chatting()) {
        turns = before.turns;
        prompt.value = before.message;
      }
      $("result").hidden = $("figures").hidden = !before.seen;
      written = before.shown.map((part) => part.textContent).join("");
      seen = before.seen;
    }
    if (began && chatting() && written) turns.push({ role: "assistant", content: written });
    $("start").disabled = false;
    $("stop").disabled = true;
    $("more").hidden = !written || chatting() || Boolean(model.subquad.image);
    $("result").removeAttribute("aria-busy");
    figures();
    setTimeout(server, 300); // the server needs a moment to notice that a client has left
  }

  function figures() {
    if (!seen) return;
    const about = model.subquad;
    // before the server counts them, the tokens of a prompt are not known, except for bytes
    const read = seen.read ?? (about.image ? 1 : about.vocab <= 260 && !chatting() ? new TextEncoder().encode(prompt.value).length : 0);
    const length = read + seen.made / seen.streams;
    const grows = about.state_bytes > about.state_bytes_first;
    const share = about.longest > 1 ? Math.max(0, length - 1) / (about.longest - 1) : 0;
    const state = seen.streams * (about.state_bytes_first + share * (about.state_bytes - about.state_bytes_first));
    const cache = seen.streams * about.kv_bytes_per_token * length, most = Math.max(state, cache, 1);
    $("state").textContent = bytes(state);
    $("cache").textContent = bytes(cache);
    $("state-bar").style.width = `${(100 * state) / most}%`;
    $("cache-bar").style.width = `${(100 * cache) / most}%`;
    const each = seen.streams > 1 ? `${seen.streams} streams of ${counted(Math.round(length), "token")}` : counted(Math.round(length), "token");
    const same = grows ? "The state of this model grows with the text, too." : `The state of this model has the same size at every length; a cache would be larger from ${counted(Math.ceil(about.state_bytes / about.kv_bytes_per_token), "token")} on.`;
    $("memory").textContent = `After ${each}. The cache is what softmax attention in all layers would keep. ${same}`;
    $("made").textContent = seen.made.toLocaleString("en");
    $("first").textContent = seen.first === null ? "–" : `${short(seen.first - seen.begun)} ms`;
    const after = seen.made - seen.early;
    $("speed").textContent = after > 0 ? short((1000 * after) / (seen.last - seen.first || 1)) : "–";
    $("cached").textContent = seen.cached === null ? "–" : `${seen.cached.toLocaleString("en")} of ${seen.read.toLocaleString("en")}`;
  }

  async function watch(mine) { // what the server does meanwhile
    while (mine === running) {
      await server();
      await new Promise((done) => { setTimeout(done, 1500); });
    }
  }

  async function server() { // what else the server does; nobody misses it if it fails
    try {
      const stats = await (await call("/stats")).json(), cache = stats.cache;
      const now = `The server: ${counted(stats.engine.running, "stream")} now, ${stats.engine.queued} waiting.`;
      const kept = cache?.entries ? ` Its prefix cache holds ${counted(cache.entries, "state")}, ${bytes(cache.bytes)}; ${cache.hits.toLocaleString("en")} of ${counted(cache.hits + cache.misses, "prompt")} began with one.` : "";
      $("server").textContent = now + kept;
    } catch { $("server").textContent = ""; }
  }

  form.onsubmit = (event) => { event.preventDefault(); start(); };
  form.onkeydown = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); start(); } };
  document.onkeydown = (event) => { if (event.key === "Escape" && running) running.abort(); };
  $("stop").onclick = () => running?.abort();
  $("clear").onclick = clear;
  $("more").onclick = () => {
    prompt.value = $("text").textContent;
    $("more").hidden = true;
    prompt.focus();
  };
  for (const choice of form.elements.mode) choice.onchange = change;
  $("door").onsubmit = (event) => {
    event.preventDefault();
    key = $("key").value.trim();
    try { sessionStorage.setItem("subquad-key", key); } catch { /* then it is asked for again */ }
    $("key").value = "";
    begin();
  };
  begin();
})();
