/** Building blocks of the page. Text always goes in as text, never as markup. */

/**
 * Return a new element.
 *
 * Attributes whose name begins with "on" are listeners; true sets an empty attribute; false, null and undefined set none.
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-")) setAttribute(element, name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return the element of this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

/** Return a number as a percentage with as many digits as it needs: 0.4 %, 12 %, 99.7 %. */
export function percent(share) {
  const value = share * 100;
  const digits = value >= 0.05 && value < 99.95 && (value < 1 || value > 99) ? 1 : 0;
  return `${value.toFixed(digits)} %`;
}

/** Set an attribute or remove it. ARIA's are "true" and "false"; of others, false removes them. */
export function setAttribute(element, name, value) {
  const absent = value === null || value === undefined || (value === false && !name.startsWith("aria-"));
  if (absent) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/** Move the tab stop and the focus among elements by arrow keys, as in a toolbar. `rows` is a function that returns them by row. */
export function rove(container, rows) {
  container.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -1e9], End: [0, 1e9] };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    const grid = rows().filter((row) => row.length);
    const y = grid.findIndex((row) => row.includes(document.activeElement));
    if (y < 0) return;
    const x = grid[y].indexOf(document.activeElement);
    const row = grid[clamp(y + move[0], grid.length)];
    moveTo(grid.flat(), row[clamp(x + move[1], row.length)]);
    event.preventDefault();
  });
  container.addEventListener("focusin", (event) => {
    const all = rows().flat();
    if (all.includes(event.target)) moveTo(all, event.target, false);
  });
}

function moveTo(all, element, focus = true) {
  for (const other of all) other.tabIndex = other === element ? 0 : -1;
  if (focus) element.focus();
}

function clamp(i, count) {
  return Math.max(0, Math.min(count - 1, i));
}
