// What client scripts of Node share: as report.py.
import assert from "node:assert/strict";

export const ANSWER = "It is 21 degrees in Bonn, é 🙂.";
export const THINKING = "I know that.";
export const MODEL = "tiny";
export const ASK = "How warm is it?";
export const ASK_AND_THINK = "Please think: how warm is it?";
export const URL = process.argv[2];
export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, degrees: { type: "integer" } },
  required: ["city", "degrees"],
  additionalProperties: false,
};
export const WEATHER = { city: "Bonn", degrees: 21 };

export const same = (found, wanted) => assert.deepEqual(found, wanted);

export async function run(features) {
  const found = {};
  for (const [name, attempt] of Object.entries(features)) {
    try {
      await attempt();
      found[name] = "";
    } catch (error) {
      found[name] = `${error?.name}: ${error?.message}`.slice(0, 400);
      console.error(error);
    }
  }
  console.log(JSON.stringify(found));
}
