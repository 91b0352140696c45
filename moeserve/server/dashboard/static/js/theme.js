// Light, dark, or as the system says; the choice is remembered.

const STORED = "moeserve.theme";
const CHOICES = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");

/** Wires the button; `onChange` is called when colours have changed. */
export function installTheme(button, onChange) {
  let choice = localStorage.getItem(STORED) ?? "system";
  const apply = () => {
    document.documentElement.dataset.theme = choice === "system" ? (dark.matches ? "dark" : "light") : choice;
    button.textContent = `Theme: ${choice}`;
    onChange();
  };
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    localStorage.setItem(STORED, choice);
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}

/** The present value of a colour variable of style.css. */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
