// @ts-check
/**
 * What is held at each moment of the memory picture, looked up in what remat_magic/views/alive.py tells.
 *
 * @typedef {{bytes: number, type: string, kind: string, what: string, place: string, code: string, line: string,
 *   expression: string, lives: number[]}} Value alike values: `lives` has for each the first number that it is held at, and
 *   the one that it is held at no more
 * @typedef {object} Told
 * @property {number} moments how many there are
 * @property {number[] | null} places the moments that are told, where it is not all
 * @property {number} peak the number of the one that holds most
 * @property {number} top how many entries a list has
 * @property {number[][]} held the bytes at each: of arguments, residuals and temporaries
 * @property {number[]} counts how many values
 * @property {string[]} said the passes and what runs
 * @property {number[]} runs which of these is at each
 * @property {Value[]} values
 * @property {number} left of the plot as it was drawn, in pixels, as are the next three
 * @property {number} right
 * @property {number} above
 * @property {number} bottom
 * @property {number} most the bytes at its upper end
 */

/** All bytes at a number. @param {Told} told @param {number} number */
export const totalAt = (told, number) => told.held.reduce((sum, kind) => sum + kind[number], 0);

/**
 * The biggest of what is held, alike values together, and how many values and bytes there are besides.
 *
 * @param {Told} told
 * @param {number} number
 */
export function aliveAt(told, number) {
  const entries = told.values
    .map((value) => {
      let count = 0;
      for (let i = 0; i < value.lives.length; i += 2) {
        count += Number(value.lives[i] <= number && number < value.lives[i + 1]);
      }
      return { value, count, bytes: count * value.bytes };
    })
    .filter(({ count }) => count)
    .sort((a, b) => b.bytes - a.bytes)
    .slice(0, told.top);
  const rest = {
    count: told.counts[number] - entries.reduce((sum, entry) => sum + entry.count, 0),
    bytes: totalAt(told, number) - entries.reduce((sum, entry) => sum + entry.bytes, 0),
  };
  return { entries, rest };
}

/** The moment that a number stands for. @param {Told} told @param {number} number */
export const placeOf = (told, number) => told.places?.[number] ?? number;

/** The number of what is told at a moment: of the last one that begins before it. @param {Told} told @param {number} place */
export function numberAt(told, place) {
  const { places } = told;
  const last = told.counts.length - 1;
  if (!places) return Math.max(0, Math.min(last, Math.floor(place)));
  let [low, high] = [0, last];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (places[middle] <= place) low = middle;
    else high = middle - 1;
  }
  return low;
}

/**
 * The outlines of the three areas, one on another; of several moments in one pixel the highest.
 *
 * @param {Told} told
 * @param {(place: number) => number} x
 * @param {(bytes: number) => number} y
 * @returns {string[]}
 */
export function outlines(told, x, y) {
  /** @type {{number: number, at: number}[]} */
  const steps = [];
  for (let number = 0; number < told.counts.length; number += 1) {
    const at = x(number ? placeOf(told, number) : 0);
    const before = steps[steps.length - 1];
    if (!before || at - before.at >= 1) steps.push({ number, at });
    else if (totalAt(told, number) > totalAt(told, before.number)) before.number = number;
  }
  const ends = steps.map((_, index) => (index + 1 < steps.length ? steps[index + 1].at : x(told.moments)));
  /** @type {number[]} */
  let below = steps.map(() => 0);
  return told.held.map((kind) => {
    const above = steps.map(({ number }, index) => below[index] + kind[number]);
    const there = steps.map(({ at }, i) => `L${at.toFixed(1)},${y(above[i]).toFixed(1)}H${ends[i].toFixed(1)}`);
    const back = steps.map(({ at }, i) => `L${ends[i].toFixed(1)},${y(below[i]).toFixed(1)}H${at.toFixed(1)}`);
    below = above;
    return `M${there.join("").slice(1)}${back.reverse().join("")}z`;
  });
}

/** Round numbers from 0 on, about so many. @param {number} most @param {number} about */
export function roundNumbers(most, about) {
  const power = 10 ** Math.floor(Math.log10(most / about));
  const step = Math.max(1, ([1, 2, 5, 10].find((factor) => most / (factor * power) <= about) ?? 10) * power);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, number) => number * step);
}
