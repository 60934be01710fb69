// The live page in headless Chromium: what `test_page.py` asks, one line of JSON for each line.
import { mkdirSync } from "node:fs";
import { createInterface } from "node:readline";
import packed from "@sparticuz/chromium";
import { chromium } from "playwright-core";

const [url, folder] = process.argv.slice(2);
mkdirSync(folder, { recursive: true });
const browser = await chromium.launch({ executablePath: await packed.executablePath(), args: ["--no-sandbox"] });

async function open(width, colorScheme) {
  const page = await browser.newPage({ viewport: { width, height: 800 }, colorScheme });
  const found = { page, errors: [], requests: [] };
  page.on("console", (message) => message.type() === "error" && found.errors.push(message.text()));
  page.on("pageerror", (error) => found.errors.push(error.message));
  page.on("request", (request) => found.requests.push(request.url()));
  await page.goto(url);
  await page.waitForFunction(() => document.getElementById("up").textContent);
  return found;
}

// the lowest contrast of a text with what is behind it, by WCAG 2
function lowestContrast() {
  const parse = (text) => (text.match(/[\d.]+/g) ?? []).map(Number);
  const over = ([r, g, b, a = 1], back) => [r, g, b].map((x, i) => a * x + (1 - a) * back[i]);
  const light = (rgb) => rgb.map((x) => x / 255).map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const fill = parse(getComputedStyle(document.querySelector(".area")).fill);
  const found = { ratio: 21, text: "" };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !element.checkVisibility() || element.closest("script, noscript")) continue;
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const style = getComputedStyle(each);
      if (style.backgroundImage !== "none") layers.push(fill);
      if (!style.backgroundColor.endsWith(", 0)")) layers.push(parse(style.backgroundColor));
    }
    const back = layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
    const [low, high] = [light(over(parse(getComputedStyle(element).color), back)), light(back)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < found.ratio) Object.assign(found, { ratio, text });
  }
  return found;
}

const asks = {
  // at a width, in a scheme
  async look({ width, scheme }) {
    const { page, errors, requests } = await open(width, scheme);
    await page.waitForTimeout(1500);
    const contrast = await page.evaluate(lowestContrast);
    const scroll = await page.evaluate(() => document.documentElement.scrollWidth);
    await page.screenshot({ path: `${folder}/page-${width}-${scheme}.png`, fullPage: true });
    await page.close();
    return { scroll, contrast, errors, elsewhere: requests.filter((each) => !each.startsWith(url)) };
  },
  // what stands in it
  async read() {
    const { page, errors } = await open(1280, "light");
    const texts = (selector) => page.locator(selector).allTextContents();
    const rows = async (id) => Promise.all((await page.locator(`#${id} tbody tr`).all()).map((row) => row.locator("td").allTextContents()));
    const pairs = async (id) => Object.fromEntries(await Promise.all((await page.locator(`#${id} > div`).all()).map(
      async (each) => [await each.locator("dt").textContent(), await each.locator("dd").textContent()])));
    const found = {
      errors, endpoints: await rows("endpoints"), loads: await rows("loads"), tools: await pairs("tools"),
      totals: await pairs("totals"), plans: await texts("#depths h3"), figures: await texts("#depths .plan .dim"),
      depths: await texts("#depths li"), health: await page.getByRole("status").textContent(),
      regions: await page.getByRole("region").count(), sections: await page.locator("section").count(),
      charts: await page.getByRole("img", { name: /, last 2 minutes/ }).count(), images: await page.getByRole("img").count(),
      headers: await page.getByRole("columnheader").allTextContents(),
    };
    await page.close();
    return found;
  },
  // without a mouse: what the tab key reaches, and what pausing stops
  async press() {
    const { page, requests } = await open(1280, "light");
    const reached = [];
    for (let i = 0; i < 2; i++) {
      await page.keyboard.press("Tab");
      reached.push(await page.evaluate(() => document.activeElement.textContent));
    }
    await page.keyboard.press("Shift+Tab");
    await page.keyboard.press("Enter");
    const label = await page.locator("button").textContent();
    await page.waitForTimeout(1200);
    const before = requests.length;
    await page.waitForTimeout(2500);
    const paused = requests.length - before;
    await page.keyboard.press("Enter");
    await page.waitForTimeout(2500);
    const resumed = requests.length - before;
    await page.close();
    return { reached, label, paused, resumed };
  },
  // when the server stops answering, answers with something else, and comes back
  async lose() {
    const { page } = await open(1280, "light");
    const notice = page.locator("#notice"), found = {};
    const wait = async (name, health) => {
      await page.waitForFunction((text) => document.getElementById("health").textContent === text, health);
      found[name] = await notice.isVisible() ? await notice.textContent() : "";
    };
    await page.route("**/stats", (route) => route.abort());
    await wait("lost", "no answer");
    await page.unroute("**/stats");
    await wait("back", "ok");
    await page.route("**/stats", (route) => route.fulfill({ status: 502, body: "<html>" }));
    await wait("bad", "no answer");
    await page.close();
    return found;
  },
  // hours of it in seconds: memory after garbage is gone
  async stay({ updates }) {
    const { page } = await open(1280, "light");
    const session = await page.context().newCDPSession(page);
    await session.send("Performance.enable");
    const run = (count) => page.evaluate(async (n) => {
      const now = await (await fetch("stats")).json();
      for (let i = 0; i < n; i++) {
        missed = 0;
        show({ ...now, output_tokens_per_s: i % 97, running: i % 5, time_to_first_token: { count: i, p50_s: i / 1e4, p99_s: i / 1e3 } });
      }
    }, count);
    const measure = async () => {
      // what the first pass finds to be garbage, the second one takes away
      for (let i = 0; i < 3; i++) {
        await page.waitForTimeout(200);
        await session.send("HeapProfiler.collectGarbage");
      }
      const { metrics } = await session.send("Performance.getMetrics");
      const value = (name) => metrics.find((each) => each.name === name).value;
      return { bytes: value("JSHeapUsedSize"), nodes: value("Nodes"), listeners: value("JSEventListeners") };
    };
    await page.getByRole("button", { name: "Pause" }).click();
    await run(300);
    const before = await measure();
    await run(updates);
    const after = await measure();
    await page.close();
    return { before, after };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { ask, ...options } = JSON.parse(line);
  console.log(JSON.stringify(await asks[ask](options)));
}
await browser.close();
