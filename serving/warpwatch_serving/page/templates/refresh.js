// Every two seconds the sections that changed are replaced; scroll position, focus and selection
// elsewhere stay, and so does a field that is written in. Without scripts the page reloads itself.
const PERIOD_MS = 2000;
const TYPING_MS = 250;
const lost = document.querySelector(".lost");
let timer = 0;

function replaceSections(page) {
  const focused = document.activeElement?.getAttribute("href");
  for (const fresh of page.querySelectorAll("main > section")) {
    const old = document.getElementById(fresh.id);
    if (!old || old.isEqualNode(fresh) || old.querySelector(":is(input, select):focus")) continue;
    const hadFocus = focused && old.contains(document.activeElement);
    old.replaceWith(fresh);
    if (hadFocus) fresh.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }
  document.title = page.title;
}

async function refresh() {
  if (!document.hidden) {
    const address = location.href;
    try {
      const answer = await fetch(address, { cache: "no-store" });
      // The session has ended: the same address shows the login page.
      if (answer.status === 401) return location.reload();
      if (!answer.ok) throw new Error(answer.statusText);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (address === location.href) replaceSections(page);
      lost.hidden = true;
    } catch {
      lost.hidden = false;
    }
  }
  schedule(PERIOD_MS);
}

function schedule(pause_ms) {
  clearTimeout(timer);
  timer = setTimeout(refresh, pause_ms);
}

// The address follows what is written into the search, so that it can be sent to somebody.
document.addEventListener("input", (event) => {
  const fields = [...new FormData(event.target.form)].filter(([, value]) => value);
  history.replaceState(null, "", `?${new URLSearchParams(fields)}`);
  schedule(TYPING_MS);
});

schedule(PERIOD_MS);
