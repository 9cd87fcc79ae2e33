// Sorts a table by the column whose heading is pressed; without this, the tables are complete and in their first order.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, at) => row.cells[at].dataset.value ?? row.cells[at].textContent.trim();
  const compare = (one, other) => {
    const [a, b] = [Number(one), Number(other)];
    return Number.isNaN(a) || Number.isNaN(b) ? one.localeCompare(other) : a - b;
  };
  heads.forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const isNumber = head.classList.contains("number");
      const order = head.ariaSort === "descending" || (!head.ariaSort && !isNumber) ? "ascending" : "descending";
      for (const one of heads) one.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...table.tBodies[0].rows];
      rows.sort((one, other) => {
        const [a, b] = [value(one, at), value(other, at)];
        return (a === "") - (b === "") || sign * compare(a, b); // what is not known comes last, either way
      });
      table.tBodies[0].append(...rows);
    });
  });
}
// A link to a version opens it.
const open = () => {
  const found = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (found instanceof HTMLDetailsElement) found.open = true;
};
addEventListener("hashchange", open);
open();
