// @ts-check
/** Numbers as people read them: the same text as remat_magic/units.py makes, which a test holds this to. */

const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];

/** With so many decimals, ties to the even digit as Python rounds them. @param {number} value @param {number} digits */
function fixed(value, digits) {
  // All of its digits: 2.675 is a little less, and no tie.
  if (!new RegExp(`\\.\\d{${digits}}50*$`).test(value.toFixed(20))) return value.toFixed(digits);
  const down = Math.floor(value * 10 ** digits);
  return ((down % 2 === 0 ? down : down + 1) / 10 ** digits).toFixed(digits);
}

/** ``48 B``, ``12.6 MB``, ``1.17 TFLOPs``. @param {number} number @param {string} unit "bytes" or "FLOPs" */
export function quantity(number, unit) {
  const short = unit === "bytes" ? "B" : unit;
  if (Math.abs(number) < 1000) return `${number} ${short}`;
  let value = number;
  let prefix = 0;
  for (; Math.abs(value) >= 999.5; prefix += 1) value /= 1000;
  const texts = [2, 1, 0].map((digits) => fixed(value, digits));
  return `${texts.find((text) => text.replace(/\D/g, "").length <= 3)} ${PREFIXES[prefix]}${short}`;
}

/** A difference with its sign, ``±0`` for none. @param {number} difference @param {string} unit */
export function change(difference, unit) {
  const text = quantity(difference, unit);
  return difference > 0 ? `+${text}` : difference < 0 ? text : "±0";
}

/** ``1 value``, ``3 values``. @param {number} number @param {string} noun */
export function count(number, noun) {
  return `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
}
