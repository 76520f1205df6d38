// Every two seconds the sections that changed are replaced; scroll position, focus and selection
// elsewhere stay. Without scripts the page reloads itself.
const PERIOD_MS = 2000;
const lost = document.querySelector(".lost");

function replaceSections(page) {
  const focused = document.activeElement?.getAttribute("href");
  for (const fresh of page.querySelectorAll("main > section")) {
    const old = document.getElementById(fresh.id);
    if (!old || old.isEqualNode(fresh)) continue;
    const hadFocus = focused && old.contains(document.activeElement);
    old.replaceWith(fresh);
    if (hadFocus) fresh.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }
  document.title = page.title;
}

async function refresh() {
  if (!document.hidden) {
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      replaceSections(new DOMParser().parseFromString(await answer.text(), "text/html"));
      lost.hidden = true;
    } catch {
      lost.hidden = false;
    }
  }
  setTimeout(refresh, PERIOD_MS);
}

setTimeout(refresh, PERIOD_MS);
